"""Owns the meaning of Lance's errors: whether a failure may pass, and the text for the user; never repeats a call.

Opening and reading use the same classification. It searches the text of an error, because Lance raises several classes
of exceptions for failures of the storage. Its words for one failure depend on the size of a file and on the call.
"""

import difflib
import errno
import os
import re
from collections.abc import Mapping
from enum import Enum, auto

import pyarrow as pa

from raylance.errors import DatasetError
from raylance.observe.record import public_uri

LANCE_ERRORS = (OSError, ValueError, pa.ArrowException)
"""The exceptions that Lance raises when the storage fails or an argument is wrong."""


class Failure(Enum):
    """How a storage failed."""

    PASSING = auto()  # a reset connection, throttling, a timeout, a truncated answer: the next attempt may succeed
    MISSING = auto()  # a wrong path, or a file that was there before and may come back
    LASTING = auto()  # access denied, a wrong request, damaged data: the next attempt will fail, too


# Texts of errors for files that are damaged or truncated in the storage. If an object store truncated only its answer,
# the text is another one ("request or response body error"), and the failure may pass.
_DAMAGE = (
    "Generic memory error",
    "failed to decode Protobuf",
    "file size is too small",
    "failed to fill whole buffer",
)
_REFUSED = (
    "lacked the necessary privileges",
    "<Code>NoSuchBucket</Code>",
    "HTTP error: builder error",  # a URL that the options do not allow
)
_NOT_THERE = (
    "Not found: ",
    " was not found",
    "Ref not found error",
    "Failed to get AWS credentials",  # the service that gives them may come back while rows are read
)
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING_STATUS = (408, 425, 429)  # those below 500
_ERRNO = re.compile(r"\(os error (\d+)\)")
_LASTING_ERRNO = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_IS_STORAGE = re.compile(r"LanceError\(IO\)|Generic \w+ error")
_PLACE = re.compile(r",? \S+\.rs:\d+(:\d+)?")  # a place in Lance's source code
_ANSWER = re.compile(
    r"(?:<\?xml.*?\?>\s*)?<Error>.*?<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?.*?</Error>", re.DOTALL
)
# Options of S3 that users set, without the optional prefix aws_.
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
    "timeout",
    "connect_timeout",
)
_OF_LANCE = ("client_max_retries", "client_retry_timeout", "download_retry_count")  # without a prefix
_INSTEAD = {"request_timeout": "timeout"}  # a name in Lance's guide, and the name that Lance knows


def failure_of(error: BaseException) -> Failure | None:
    """Classifies an error. Returns None if the storage did not fail, for example if a filter is wrong.

    A `DatasetError` is classified by its cause. Without a cause it is lasting.
    """
    if isinstance(error, DatasetError):
        return Failure.LASTING if error.__cause__ is None else failure_of(error.__cause__)
    if isinstance(error, TimeoutError | ConnectionError):
        return Failure.PASSING
    text = str(error)
    if any(sign in text for sign in (*_DAMAGE, *_REFUSED)):
        return Failure.LASTING
    found = _of_code(text)
    if found is None and any(sign in text for sign in _NOT_THERE):
        found = Failure.MISSING
    return found or (Failure.PASSING if _IS_STORAGE.search(text) else None)


def _of_code(text: str) -> Failure | None:
    """Classifies by the status in an object store's answer, or by the number of a system error; None without both."""
    if status := _STATUS.search(text):
        code = int(status[1])
        if code == 404:
            return Failure.MISSING
        return Failure.LASTING if 400 <= code < 500 and code not in _PASSING_STATUS else Failure.PASSING
    if number := _ERRNO.search(text):
        code = int(number[1])
        if code == errno.ENOENT:
            return Failure.MISSING
        return Failure.LASTING if code in _LASTING_ERRNO else Failure.PASSING
    return None


def readable_text(error: BaseException) -> str:
    """Returns an error's text without places in Lance's source code, XML of a storage API, and passwords in URLs."""
    return public_uri(_PLACE.sub("", _ANSWER.sub(r"\1: \2", str(error)))).strip().rstrip(".")


def describe_odd_option(uri: str, options: Mapping[str, str] | None) -> str:
    """Returns a sentence about an option of S3 that may prevent the opening; "" if all look right, or without S3."""
    if not uri.startswith("s3"):
        return ""
    names = {key.lower().removeprefix("aws_"): key for key in options or {}}
    known = (*_OF_S3, *_OF_LANCE)
    for name in sorted(names.keys() - set(known)):
        if meant := [_INSTEAD[name]] if name in _INSTEAD else difflib.get_close_matches(name, known, 1, 0.8):
            prefix = "" if meant[0] in _OF_LANCE else "aws_"
            return f" Among storage_options, {names[name]!r} is unknown: was {prefix}{meant[0]} meant?"
    by_name = {name: (options or {})[key] for name, key in names.items()}
    endpoint = by_name.get("endpoint_url") or by_name.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint.startswith("http://") and "allow_http" not in by_name and "AWS_ALLOW_HTTP" not in os.environ:
        return f" {public_uri(endpoint)} is not https: set allow_http=true in storage_options, or AWS_ALLOW_HTTP=true."
    return ""
