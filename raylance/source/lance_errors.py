"""What Lance's errors mean: whether a failure may pass, and the text for the user.

It searches the text of an error, because Lance raises several classes of exceptions for failures of the storage, with
words that depend on the size of a file and on the call.
"""

import difflib
import email.utils
import errno
import os
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from enum import Enum, auto

import pyarrow as pa

from raylance.errors import DatasetError
from raylance.secrets import public_uri

LANCE_ERRORS = (OSError, ValueError, pa.ArrowException)
"""The exceptions that Lance raises when the storage fails or an argument is wrong."""


class Failure(Enum):
    """How a storage failed."""

    PASSING = auto()  # a reset connection, throttling, a timeout, a truncated answer: the next attempt may succeed
    MISSING = auto()  # a wrong path, or a file that was there before and may come back
    LASTING = auto()  # access denied, a wrong request, damaged data: the next attempt will fail, too


# Texts of errors for files that are damaged or truncated in the storage. If an object store truncated only its answer,
# the text is another one ("request or response body error"), and the failure may pass.
_DAMAGE = ("Generic memory error", "failed to decode Protobuf", "file size is too small", "failed to fill whole buffer")
_REFUSED = (
    "lacked the necessary privileges",
    "<Code>NoSuchBucket</Code>",
    "HTTP error: builder error",  # a URL that the options do not allow
    "Generic Config error",  # an option that has no such value
)
_NOT_THERE = (
    "Not found: ",
    " was not found",
    "Ref not found error",
    "Failed to get AWS credentials",  # the service that gives them may come back while rows are read
    "Error performing token request",  # the same of Google and Azure
    "NotFound (permanent)",
)
_PERMANENT = " (permanent) at "  # by the client of hf, oss, cos and tos
_STATUS = re.compile(r"\bstatus(?: code)?: (\d{3})")
_PASSING_STATUS = (408, 425, 429)  # those below 500
_RETRY_AFTER = re.compile(r'(?i)"retry-after": "([^"]+)"')
_ERRNO = re.compile(r"\(os error (\d+)\)")
_LASTING_ERRNO = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_IS_STORAGE = re.compile(r"LanceError\(IO\)|Generic \w+ error")
_PLACE = re.compile(r",? \S+\.rs:\d+(:\d+)?")  # a place in Lance's source code
_HEADERS = re.compile(r", version: HTTP/\S+, headers: \{[^}]*\}")
_URL = re.compile(r"https?://[^\s,]+")
_NO_VALUE = re.compile(r'failed to parse "(.*?)" as (\w+)')
_FORMS = {"Duration": 'a time with its unit, such as "30s"', "boolean": '"true" or "false"', "usize": "a whole number"}
_MALFORMED = ("InvalidUri", "InvalidHeaderValue", "on an `Err` value: ()")  # panics about options, not about files
_DENIED = re.compile(r"(?i)credential|token request|\bstatus(?: code)?: 40[13]|privileges|PermissionDenied")
_SKIPS = {"s3": "aws", "s3+ddb": "aws", "gs": "google", "az": "azure", "abfss": "azure"}
_OF_STORES = ("AWS_", "GOOGLE_", "AZURE_", "OBJECT_STORE_", "OSS_", "HF_", "COS_", "TOS_")  # environment variables
_ANSWER = re.compile(
    r"(?:<\?xml.*?\?>\s*)?<Error>.*?<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?.*?</Error>", re.DOTALL
)
# Options of S3 that users set, without the optional prefix aws_.
_OF_S3 = (
    "access_key_id", "secret_access_key", "session_token", "token", "region", "default_region", "endpoint",
    "endpoint_url", "allow_http", "skip_signature", "virtual_hosted_style_request", "timeout", "connect_timeout",
)  # fmt: skip
_OF_LANCE = ("client_max_retries", "client_retry_timeout", "download_retry_count")  # without a prefix
_INSTEAD = {"request_timeout": "timeout"}  # a name in Lance's guide, and the name that Lance knows


def failure_of(error: BaseException) -> Failure | None:
    """Classifies an error, a `DatasetError` by its cause, without one as lasting. Returns None if the storage did not
    fail, for example if a filter is wrong.
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
    if found is None and _PERMANENT in text:
        found = Failure.LASTING
    return found or (Failure.PASSING if _IS_STORAGE.search(text) else None)


def asked_pause_s(error: BaseException) -> float:
    """Returns the seconds for which the storage asks to wait (`Retry-After`), as far as the text of an error has them:
    those of `hf://` do; else 0.
    """
    if isinstance(error, DatasetError) and error.__cause__ is not None:
        return asked_pause_s(error.__cause__)
    found = _RETRY_AFTER.search(str(error))
    if found is None:
        return 0.0
    if found[1].isdecimal():
        return float(found[1])
    try:
        until = email.utils.parsedate_to_datetime(found[1])
    except ValueError:
        return 0.0
    return max(0.0, until.timestamp() - time.time())


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
    return public_uri(_PLACE.sub("", _HEADERS.sub("", _ANSWER.sub(r"\1: \2", str(error))))).strip().rstrip(".")


def describe_panic(error: BaseException) -> str:
    """Returns the cause of a panic in Lance while a dataset is opened: the options, or else the manifest."""
    if any(sign in str(error) for sign in _MALFORMED):
        return f"Lance cannot make a request of the options or the environment: {error}"
    return f"the manifest is damaged: {error}"


def unknown_host(error: BaseException) -> str | None:
    """Returns the host of a request that failed if there is no host of this name; None if it may be there."""
    url = _URL.search(str(error)) if failure_of(error) is Failure.PASSING else None
    host = urllib.parse.urlsplit(url[0]).hostname if url else None
    if host is None or {"http", "https", "all"} & urllib.request.getproxies().keys():  # a proxy may know the name
        return None
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as unknown:
        return host if unknown.errno == socket.EAI_NONAME else None  # others may pass
    except ValueError:  # a label of more than 63 characters
        return host
    return None


def describe_denied(uri: str, error: BaseException) -> str:
    """Returns a sentence about a public bucket if the storage wants credentials; "" otherwise."""
    scheme = uri.partition("://")[0]
    if not _DENIED.search(str(error)):
        return ""
    if scheme == "hf":
        return " A private repository needs a token, hf_token in storage_options or HF_TOKEN."
    if scheme not in _SKIPS:
        return ""
    option = f"{_SKIPS[scheme]}_skip_signature"
    return f' A public bucket is read without credentials: set {option}="true" in storage_options.'


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


def describe_odd_value(options: Mapping[str, str], error: BaseException) -> str:
    """Returns a sentence about the value of an option, or of a variable of the environment, that an error blames; ""
    if there is none. Secrets are not shown.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith(_OF_STORES)}
    for where, given in (("Among storage_options", options), ("In the environment", environment)):
        for name, value in given.items():
            wrong = _NO_VALUE.search(str(error))
            if wrong and value == wrong[1] and wrong[2] in _FORMS:
                return f" {where}, {name} is {value!r}: it must be {_FORMS[wrong[2]]}."
            if any(sign in str(error) for sign in _MALFORMED) or _DENIED.search(str(error)):
                if "service_account" not in name.lower() and re.search(r"[\x00-\x1f\x7f]|^\s|\s$", value):
                    return f" {where}, {name} begins or ends with a space, or has a line end in it: remove it."
                if "endpoint" in name.lower() and value and not re.match("https?://", value):
                    return f" {where}, {name} is {public_uri(value)!r}: it must begin with https:// or http://."
    return ""
