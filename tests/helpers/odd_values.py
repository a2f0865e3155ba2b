"""Arrow values of every kind."""

from typing import Any

import numpy as np
import pyarrow as pa


def value(kind: pa.DataType, rng: np.random.Generator) -> Any:
    """A value of a type, as `pa.array` takes it."""
    if pa.types.is_fixed_size_list(kind):
        return [value(kind.value_type, rng) for _ in range(kind.list_size)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [value(kind.value_type, rng) for _ in range(rng.integers(0, 5))]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return rng.bytes(rng.integers(0, 9))
    if pa.types.is_fixed_size_binary(kind):
        return rng.bytes(kind.byte_width)
    if pa.types.is_struct(kind):
        return {field.name: value(field.type, rng) for field in kind}
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "".join(rng.choice(["a", "é", "中"], rng.integers(0, 5)))
    return bool(rng.integers(2)) if pa.types.is_boolean(kind) else int(rng.integers(0, 100))
