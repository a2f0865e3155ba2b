"""Checks that a decoder keeps the promises that raylance relies on."""

import contextlib
import copy
import dataclasses
import gc
import json
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.decode.decoder import BatchDecoder, Decoder, RaggedDecoder, is_on_device, wrong_ragged
from raylance.decode.open_decoding import resolve_decoder
from raylance.descriptions import describe
from raylance.errors import ConfigError, DatasetError
from raylance.orders.permutation import derive_key, subkeys, uniform

_KEY = derive_key("raylance.testing")
_THREADS, _ROUNDS = 2, 3  # each of 2 threads decodes all samples 3 times


def check_decoder(decoder: Decoder, samples: Sequence[bytes], *, bad: Sequence[bytes] | None = None) -> None:
    """Checks that a decoder keeps the promises that raylance relies on.

    - The decoder is a frozen dataclass. Pickling changes neither the decoder nor its description in a checkpoint.
    - The object that `open` returns writes the whole output array, or returns an array, with the decoder's shape and
      dtype. It neither keeps nor changes the bytes.
    - The array depends only on the row's bytes and draws (its random numbers). It does not depend on rows that were
      decoded before, in the same batch, or in other threads.
    - Bad bytes raise an error, and the rows after them decode as before.

    Args:
        decoder: The decoder, of any kind. Fields that the user left open are taken from the first sample.
        samples: Bytes of good rows, at least two of which decode to different arrays.
        bad: Bytes that must raise an error. None takes an empty row, halves of the samples, and random bytes. Give
            other bytes if some of these are valid in the format, and () if all bytes are valid.

    Raises:
        AssertionError: If a promise is broken; the message has the first broken promise.
        ConfigError: If opening a dataset with the decoder would raise one, e.g. for a shape that no column can have.
    """
    if not isinstance(decoder, Decoder):
        raise AssertionError(f"{decoder!r} is not a raylance.Decoder: give an object of a subclass of it.")
    if not (
        isinstance(samples, Sequence) and all(isinstance(each, bytes | bytearray | memoryview) for each in samples)
    ):
        raise ConfigError(f"check_decoder(samples={samples!r:.80}): give a list of bytes.")
    if len(samples) < 2:
        _fail(decoder, f"{len(samples)} samples show little: give at least two, which decode to different arrays")
    try:
        resolved = resolve_decoder(
            decoder, pa.table({decoder.column: pa.array(samples[:1], pa.binary()), ROW_OFFSET: [0]})
        )
    except DatasetError as error:
        _fail(decoder, f"cannot decode the first sample ({type(error.__cause__).__name__}: {error.__cause__})", error)
    described = _check_setting(resolved)
    trial = _Trial(resolved, samples)
    trial.check_output()
    trial.check_threads()
    trial.check_batches()
    trial.check_bad(trial.damaged() if bad is None else bad)
    if json.dumps(describe(resolved)) != described:
        _fail(resolved, "was changed by decoding: keep in what open() returns what changes from row to row")
    if _Trial(_sent(resolved), samples).expected != trial.expected:
        _fail(resolved, "decodes differently once it was pickled: what decides must be in its fields")


def _fail(decoder: Decoder, what: str, error: Exception | None = None) -> NoReturn:
    raise AssertionError(f"{type(decoder).__name__}({decoder.column!r}): {what}.") from error


def _sent(decoder: Decoder) -> Any:
    """Returns a decoder as it arrives in another process."""
    from ray import cloudpickle  # here, so that a check of orders does not load Ray

    return pickle.loads(cloudpickle.dumps(decoder))  # type: ignore[no-untyped-call]


def _check_setting(decoder: Decoder) -> str:
    """Checks that a decoder is frozen and equals its copy, and that pickling keeps its description; returns this."""
    for field in dataclasses.fields(decoder):
        with contextlib.suppress(dataclasses.FrozenInstanceError):
            setattr(decoder, field.name, getattr(decoder, field.name))
            _fail(decoder, f"its field {field.name} can be set: make it a dataclass(frozen=True)")
    try:
        equal, loaded = bool(copy.deepcopy(decoder) == decoder), _sent(decoder)
        before, after = (json.dumps(describe(one)) for one in (decoder, loaded))
    except Exception as error:
        _fail(decoder, f"cannot be copied, compared, pickled and described ({type(error).__name__}: {error})", error)
    if before != after:
        _fail(decoder, f"a checkpoint would say {before} of it, and {after} once it was pickled")
    if not equal:
        _fail(decoder, "a copy is not equal to it, so mixtures of datasets would refuse it")
    return before


class _Trial:
    """A decoder and rows to decode with it: their bytes, their draws and their results."""

    def __init__(self, decoder: Decoder, samples: Sequence[bytes]) -> None:
        self._decoder, self._samples = decoder, [bytes(sample) for sample in samples]
        self._draws = uniform(subkeys(_KEY, np.arange(len(samples))), decoder.draws)
        self.expected = [self._decode(self._open(), [row])[0] for row in range(len(samples))]
        if len(set(self.expected)) < 2:
            _fail(decoder, "all samples decode to the same, which shows little: give rows that differ")

    def check_output(self) -> None:
        for row, expected in enumerate(self.expected):
            if self._decode(self._open(), [row]) != [expected]:
                _fail(self._decoder, f"sample {row} decodes differently each time: only bytes and draws may decide")
            if self._decode(self._open(), [row], garbage=0xFF) != [expected]:
                _fail(self._decoder, f"sample {row} leaves parts of `out` as they were: write all of it")
        self._check_rows(self._open(), "after others", [*range(len(self.expected))] * 2)

    def check_batches(self) -> None:
        """Checks that a batch decoder's result for a row does not depend on the other rows of the batch."""
        if not isinstance(self._decoder, BatchDecoder):
            return
        rows = list(range(len(self.expected)))
        for order in (rows, rows[::-1], [*rows, *rows]):
            for made, row in zip(self._decode(self._open(), order), order, strict=True):
                if made != self.expected[row]:
                    _fail(self._decoder, f"sample {row} decodes differently beside others: a batch may hold any rows")

    def check_threads(self) -> None:
        start = threading.Barrier(_THREADS)

        def decode_all(first: int) -> None:
            start.wait()
            rows = np.roll(np.arange(len(self.expected)), first).tolist()
            self._check_rows(self._open(), "while another thread decodes", rows * _ROUNDS)

        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(decode_all, range(_THREADS)))

    def check_bad(self, bad: Sequence[bytes]) -> None:
        opened = self._open()
        for encoded in bad:
            these = f"{len(encoded)} bad bytes, {encoded[:8]!r}…,"
            try:
                self._call(opened, [memoryview(encoded)], self._draws[:1].copy(), self._garbage(1, 0))
            except ConfigError as error:
                _fail(
                    self._decoder, f"{these} raise ConfigError, which on_bad_row= does not mask: raise another", error
                )
            except Exception:  # any error of a codec
                self._check_rows(opened, f"after {these}", range(len(self.expected)))
            else:
                _fail(self._decoder, f"{these} decode: raise an error, or say by bad= what must be refused")

    def damaged(self) -> list[bytes]:
        """Returns bytes that most codecs refuse: no bytes, halves of the samples, random bytes."""
        noise = [subkeys(_KEY, np.arange(len(sample) // 8 + 1)).tobytes()[: len(sample)] for sample in self._samples]
        return [b"", *(sample[: len(sample) // 2] for sample in self._samples), *noise]

    def _check_rows(self, opened: Any, when: str, rows: Sequence[int]) -> None:
        for row in rows:
            if self._decode(opened, [row]) != [self.expected[row]]:
                _fail(self._decoder, f"sample {row} decodes differently {when}: only bytes and draws may decide")

    def _open(self) -> Any:
        """Opens the decoder; opens a decoder for the trainer's device on the CPU."""
        if is_on_device(self._decoder):
            import torch  # here, so that a check of orders does not load it

            return self._decoder.open_on(torch.device("cpu"))
        return self._decoder.open()

    def _garbage(self, rows: int, byte: int) -> npt.NDArray[Any]:
        """Returns memory for output, shape (rows, *shape), in which every byte is `byte`."""
        dtype = np.dtype(self._decoder.dtype)
        memory = np.full(rows * int(np.prod(self._decoder.shape)) * dtype.itemsize, byte, np.uint8).view(dtype)
        return memory.reshape(rows, *self._decoder.shape)

    def _call(
        self, opened: Any, encoded: list[memoryview], draws: npt.NDArray[np.float64], out: npt.NDArray[Any]
    ) -> list[bytes]:
        """Decodes rows by the method of the decoder's kind; returns each array's bytes, so that NaN equals NaN."""
        if is_on_device(self._decoder):
            import torch

            lent = [bytearray(value) for value in encoded]
            tensors = [torch.frombuffer(each, dtype=torch.uint8) if each else torch.empty(0).byte() for each in lent]
            self._refuse_returned("decode_batch", opened.decode_batch(tensors, draws, torch.from_numpy(out)))
            for row, (each, value) in enumerate(zip(lent, encoded, strict=True)):
                if each != value:
                    _fail(self._decoder, f"sample {row} was changed: its memory is not the decoder's")
        elif isinstance(self._decoder, BatchDecoder):
            self._refuse_returned("decode_batch", opened.decode_batch(encoded, draws, out))
        elif isinstance(self._decoder, RaggedDecoder):
            return [self._checked(opened.decode(value, numbers)) for value, numbers in zip(encoded, draws, strict=True)]
        else:
            for row, value in enumerate(encoded):
                self._refuse_returned("decode_into", opened.decode_into(value, draws[row], out[row, ...]))
        return [array.tobytes() for array in out]

    def _checked(self, made: Any) -> bytes:
        """Checks the result of a ragged decoder, and returns its shape and content as bytes."""
        if wrong := wrong_ragged(self._decoder, made):
            _fail(self._decoder, f"a sample was decoded to {wrong}")
        return b"".join([repr(made.shape).encode(), made.tobytes()])

    def _refuse_returned(self, method: str, made: Any) -> None:
        if made is not None:
            _fail(self._decoder, f"{method} returned {type(made).__name__}: it must write into `out`")

    def _decode(self, opened: Any, rows: Sequence[int], garbage: int = 0) -> list[bytes]:
        """Decodes samples, and checks that their bytes are neither changed nor kept."""
        lent = [bytearray(self._samples[row]) for row in rows]
        named = f"sample {rows[0]}" if len(rows) == 1 else "samples"
        try:
            views = [memoryview(each).toreadonly() for each in lent]
            made = self._call(opened, views, self._draws[rows].copy(), self._garbage(len(rows), garbage))
        except AssertionError:
            raise
        except Exception as error:
            _fail(self._decoder, f"cannot decode {named} ({type(error).__name__}: {error})", error)
        del views
        for each, row in zip(lent, rows, strict=True):
            if each != self._samples[row]:
                _fail(self._decoder, f"sample {row} was changed: its memory is not the decoder's")
            if _is_viewed(each):
                _fail(self._decoder, f"sample {row} is kept: its memory is not the decoder's. Copy what is needed")
        return made


def _is_viewed(memory: bytearray) -> bool:
    """Whether a view of the memory still exists. Garbage that is not collected yet does not count."""
    for _ in range(2):
        try:
            memory.append(0)
        except BufferError:
            gc.collect()
        else:
            return False
    return True
