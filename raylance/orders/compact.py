"""Lists in checkpoints, which are compressed if they are long."""

import base64
import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from raylance.errors import ConfigError

_MOST_PLAIN = 16  # segments that a state holds in plain words; a thousand take 8 kB of compressed JSON


@contextlib.contextmanager
def refusing(name: str, value: Any) -> Iterator[None]:
    """Raises ConfigError if a value of a checkpoint is damaged."""
    try:
        yield
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ConfigError(f"its {name} are {str(value)[:200]!r}: {error}") from error


def packed(values: list[Any]) -> Any:
    """Returns a list for a checkpoint, as `unpacked` reads it: compressed if it is long."""
    if len(values) <= _MOST_PLAIN:
        return values
    return {"packed": base64.b85encode(zlib.compress(json.dumps(values).encode(), 9)).decode()}


def is_packed(value: Any) -> bool:
    """Whether a value of a checkpoint is compressed. The same values may be compressed otherwise elsewhere."""
    return isinstance(value, Mapping) and [*value] == ["packed"]


def unpacked(value: Any) -> list[Any]:
    """Returns a list of a checkpoint, which may be compressed. Raises ValueError, TypeError or zlib.error if it is
    damaged.
    """
    if is_packed(value):
        value = json.loads(zlib.decompress(base64.b85decode(value["packed"])))
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value
