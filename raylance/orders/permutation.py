"""Keyed hashing, and the keyed bijection of [0, n).

All random numbers of raylance's shuffles, sampling and augmentation come from here, and not from NumPy's generators,
which may draw other numbers in another version. The outputs are part of the checkpoint format: if a constant or an
operation changed, every saved run would resume on other rows. Golden tests detect such a change.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from raylance.errors import ConfigError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

_ROUNDS = 6
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)
_ROUND_CONSTANTS = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN_GAMMA
_U1, _U11, _U27, _U30, _U31 = (np.uint64(v) for v in (1, 11, 27, 30, 31))


def derive_key(*parts: int | str) -> int:
    """Hashes parts, which are strings and integers of any size, to a 64-bit key, e.g. (seed, epoch, "window").

    Types and order matter: (0, 1) and (1, 0) give unrelated keys, and so do "1" and 1.
    """
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(x: UInt64Array) -> UInt64Array:
    """Mixes 64-bit words by the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", 2014): each output bit depends on each input bit.
    """
    x = x ^ (x >> _U30)  # the next lines work in place, because this runs for each row of each batch
    x *= _MUL1
    x ^= x >> _U27
    x *= _MUL2
    x ^= x >> _U31
    return x


def subkeys(key: int | UInt64Array, index: npt.ArrayLike) -> UInt64Array:
    """Derives one 64-bit key, uint64, from each integer of `index`; the result has the shape of `index`.

    Args:
        key: The key to derive from, or one for each integer.
        index: Integers of any shape; negative ones are read as 64-bit words in two's complement.
    """
    words = np.asarray(index).astype(np.int64).view(np.uint64)
    return mix64(mix64((words + _U1) * _GOLDEN_GAMMA) ^ np.asarray(key, dtype=np.uint64))


def uniform(keys: UInt64Array, draws: int) -> npt.NDArray[np.float64]:
    """Draws uniform numbers from keys.

    Args:
        keys: uint64, shape (n,).
        draws: Number of draws for each key.

    Returns:
        float64 in [0, 1), shape (n, draws). Draw k of a key does not depend on `draws`.
    """
    counters = (np.arange(1, draws + 1, dtype=np.uint64)) * _GOLDEN_GAMMA  # (draws,)
    words = mix64(keys[:, None] + counters[None, :])  # (n, draws)
    return (words >> _U11).astype(np.float64) * 2.0**-53


def row_rng(seed: int, epoch: int, row: int) -> np.random.Generator:
    """Returns a random generator for user code, the same for a row on every rank, decoder and machine.

    Args:
        seed: Seed of the run.
        epoch: Epoch.
        row: Row offset, which batches carry under `_rowoffset`.

    Returns:
        A generator that is independent of those for other rows. With another version of NumPy it may draw other
        numbers; therefore raylance itself does not use such generators.

    Raises:
        ConfigError: If `row` is not a number.
    """
    try:
        key = derive_key(seed, epoch, "row_rng", int(row))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"row_rng({seed!r}, {epoch!r}, {row!r}): all three are integers.") from error
    return np.random.Generator(np.random.Philox(key))


def permute(index: npt.ArrayLike, n: npt.ArrayLike, key: npt.ArrayLike) -> Int64Array:
    """Maps each index to another index by a permutation of [0, n) that follows from a key.

    The permutation is a balanced Feistel network over the smallest even number of bits that [0, n) needs. It is applied
    again while the output lies outside of [0, n) (cycle walking; Black, Rogaway: "Ciphers with arbitrary finite
    domains", 2002): fewer than four times for an index on average. The memory does not depend on n.

    Args:
        index: Integers in [0, n).
        n: Domain size, at most 2**62: a scalar, or one for each index.
        key: 64-bit key: a scalar, or one for each index.

    Returns:
        int64, of the common shape of the arguments.
    """
    return _walk(index, n, key, inverse=False)


def unpermute(index: npt.ArrayLike, n: npt.ArrayLike, key: npt.ArrayLike) -> Int64Array:
    """Returns the index that `permute` maps to each value; takes the same arguments."""
    return _walk(index, n, key, inverse=True)


def _walk(index: npt.ArrayLike, n: npt.ArrayLike, key: npt.ArrayLike, *, inverse: bool) -> Int64Array:
    sizes_in = np.asarray(n).astype(np.uint64)
    i, sizes, keys = np.broadcast_arrays(
        np.asarray(index).astype(np.uint64), sizes_in, np.asarray(key).astype(np.uint64)
    )
    shape = i.shape
    out, sizes, keys = i.ravel().copy(), sizes.ravel(), keys.ravel()
    # Usually all indices have the same domain; a scalar shift is then several times faster than an array of shifts.
    is_one = sizes.size > 0 and (sizes_in.ndim == 0 or bool((sizes == sizes[0]).all()))
    half = _half_bits(sizes[0] if is_one else sizes)
    out = _feistel(out, half, keys, inverse)
    outside = np.flatnonzero(out >= sizes)
    while outside.size:
        sub_half = half if half.ndim == 0 else half[outside]
        walked = _feistel(out[outside], sub_half, keys[outside], inverse)
        out[outside] = walked
        outside = outside[walked >= sizes[outside]]
    return out.astype(np.int64).reshape(shape)


def _half_bits(n: UInt64Array) -> UInt64Array:
    """Returns half the number of bits that an index in [0, n) needs, rounded up; at least 1. Exact up to n = 2**62."""
    bits: UInt64Array = np.zeros(n.shape, dtype=np.uint64)
    rest: UInt64Array = np.subtract(n, np.minimum(n, _U1))
    for shift in (32, 16, 8, 4, 2, 1):
        above = (rest >> np.uint64(shift) > 0).astype(np.uint64) * np.uint64(shift)
        bits, rest = np.add(bits, above), np.right_shift(rest, above)
    return np.asarray(np.maximum((bits + rest + _U1) >> _U1, _U1), dtype=np.uint64)


def _feistel(x: UInt64Array, half: UInt64Array, keys: UInt64Array, inverse: bool) -> UInt64Array:
    mask = (_U1 << half) - _U1
    left: UInt64Array = x >> half
    right: UInt64Array = x & mask
    rounds = range(_ROUNDS - 1, -1, -1) if inverse else range(_ROUNDS)
    for r in rounds:
        # round r of the permutation: (left, right) -> (right, left ^ f(right))
        if inverse:
            left, right = right ^ (mix64((left ^ keys) + _ROUND_CONSTANTS[r]) & mask), left
        else:
            left, right = right, left ^ (mix64((right ^ keys) + _ROUND_CONSTANTS[r]) & mask)
    return (left << half) | right
