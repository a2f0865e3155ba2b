"""Owns states as older versions of raylance would have written them."""

from collections.abc import Mapping
from typing import Any

SINCE_FORMAT = {
    2: ["branch", "identity", "columns", "decode", "transform"],
    3: ["codecs"],
    4: ["window_bytes", "step", "global_step", "checksum"],
}
"""Fields of a state by the format that brought them."""


def as_of_format(number: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as an older raylance would have written it."""
    later = {name for since, names in SINCE_FORMAT.items() if since > number for name in names}
    return {name: value for name, value in state.items() if name not in later} | {"format": number}
