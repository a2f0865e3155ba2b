"""Owns what Lance's errors say: whether they may pass, and what of their text concerns a user; never tries again."""

import difflib
import os
import re
from collections.abc import Mapping

from raylance.errors import DatasetError

# Of a file that came whole and makes no sense: in a page that was read already, or in its footer.
_DAMAGE = ("Generic memory error", "failed to decode Protobuf")
_PLACE = re.compile(r",? \S+\.rs:\d+(:\d+)?")  # in Lance's own code, which nobody here has
_ANSWER = re.compile(
    r"(?:<\?xml.*?\?>\s*)?<Error>.*?<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?.*?</Error>", re.DOTALL
)
# Options of S3 that are given by hand, without the prefix aws_ that all of them may have.
_OF_S3 = (
    "access_key_id",
    "secret_access_key",
    "session_token",
    "token",
    "region",
    "default_region",
    "endpoint",
    "endpoint_url",
    "allow_http",
    "skip_signature",
    "virtual_hosted_style_request",
    "request_timeout",
    "connect_timeout",
)


def may_pass(error: BaseException) -> bool:
    """Whether a read may succeed when it is tried again: the storage failed, and not the data or the question.

    Lance wraps what object stores say into errors of several classes, and names only in the text that it was I/O; so
    it calls some of what comes of a damaged file, too.
    """
    if isinstance(error, DatasetError) and error.__cause__ is not None:
        return may_pass(error.__cause__)
    text = str(error)
    is_io = "LanceError(IO)" in text and not any(sign in text for sign in _DAMAGE)
    return is_io or isinstance(error, (TimeoutError, ConnectionError))


def tell(error: BaseException) -> str:
    """The text of an error without the lines of Lance's source code that it came by, and without an API's XML."""
    return _PLACE.sub("", _ANSWER.sub(r"\1: \2", str(error))).strip().rstrip(".")


def suspect(uri: str, options: Mapping[str, str] | None) -> str:
    """A sentence on what is odd about the storage options of a dataset that does not open, or nothing."""
    if not uri.startswith("s3"):
        return ""
    names = {key.lower().removeprefix("aws_"): key for key in options or {}}
    for name in sorted(names.keys() - set(_OF_S3)):
        if meant := difflib.get_close_matches(name, _OF_S3, 1, 0.8):
            return f" Among storage_options, {names[name]!r} is unknown: was aws_{meant[0]} meant?"
    by_name = {name: (options or {})[key] for name, key in names.items()}
    endpoint = by_name.get("endpoint_url") or by_name.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint.startswith("http://") and "allow_http" not in by_name and "AWS_ALLOW_HTTP" not in os.environ:
        return f" {endpoint} is no https: it takes allow_http=true among storage_options, or AWS_ALLOW_HTTP=true."
    return ""
