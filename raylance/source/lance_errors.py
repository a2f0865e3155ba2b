"""Owns what Lance's errors say: whether they may pass, and what of their text concerns a user; never tries again."""

import re

from raylance.errors import DatasetError

# Of a file that came whole and makes no sense: in a page that was read already, or in its footer.
_DAMAGE = ("Generic memory error", "failed to decode Protobuf")
_PLACE = re.compile(r",? \S+\.rs:\d+(:\d+)?")  # in Lance's own code, which nobody here has


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
    """The text of an error without the lines of Lance's source code that it came by."""
    return _PLACE.sub("", str(error)).strip().rstrip(".")
