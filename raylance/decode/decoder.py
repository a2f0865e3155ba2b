"""The protocol of decoders: a setting that defines a decoded column, and the object that it opens, which decodes."""

import abc
import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.arguments import check_integer
from raylance.decode.arrays import to_arrow
from raylance.descriptions import Setting
from raylance.errors import ConfigError

if TYPE_CHECKING:
    import torch

Draws = npt.NDArray[np.float64]


class RowDecoder(Protocol):
    """Decodes rows, one after another; belongs to one thread, so it may keep scratch memory between rows.

    A row decoder with a fast and a slow method may count the rows that took the slow method in an attribute
    `fallbacks`, which `stats()` adds up. The row decoder of a decoder with `like` may have a method
    `check_like(encoded, other)`. It gets the bytes of both columns, and raises if they do not fit together.
    """

    def decode_into(self, encoded: memoryview, draws: Draws, out: npt.NDArray[Any]) -> None:
        """Decodes one row.

        The result must depend only on the arguments, never on rows decoded before.

        Args:
            encoded: The row's bytes, read-only, valid until this returns.
            draws: Uniform numbers in [0, 1) of this seed, epoch and row, float64, shape (decoder.draws,).
            out: Memory for the row, of the decoder's shape and dtype, not initialised; all of it must be written.

        Raises:
            ConfigError: If a good row does not fit the settings; this ends the epoch, even with `on_bad_row="mask"`.
                The message continues the words "column … of row offset …".
            ImportError, MemoryError: If this machine cannot decode; this ends the epoch.
            Exception: Any other error, if the row is bad; `on_bad_row` decides what happens then.
        """
        ...


class RowDecoderGroup(Protocol):
    """Decodes rows once for several decoders of one column, in one thread. It may have what `RowDecoder` may."""

    def decode_all(self, encoded: memoryview, draws: Sequence[Draws], outs: Sequence[npt.NDArray[Any]]) -> None:
        """Decodes one row for all decoders of the group, each as if it decoded alone. `draws` and `outs` have one array
        for each decoder. Raises the errors of `RowDecoder.decode_into`.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder(Setting, abc.ABC):
    """Base class of `raylance.Image` and of your own decoders: a setting that decodes a column of bytes to arrays of
    one shape.

    A subclass is a frozen dataclass. Its fields are compared and pickled. Checkpoints hold the fields, except those
    with `repr=False`. The attributes below may be fields, constants of the class, or properties.

    Attributes:
        column: The binary column to read.
        shape: Shape of one decoded row; () for a number.
        dtype: NumPy dtype of a decoded row: numbers or bool.
        draws: Number of uniform random numbers that the decoder gets for each row, keyed by seed, epoch and row; 0 by
            default.
        channels_last: Whether the last axis of a `shape` (…, H, W, C) holds channels. If so, torch batches have them
            before height and width, (…, C, H, W), in channels-last memory; other formats keep the shape. False by
            default; no effect on a shape with fewer than three axes.
        content: Name of the kind of data in the column for error texts, such as "images".
        name: Name of the decoded column; None for `column`. With names, several decoders may read one column.
        like: Name of another decoded column. This decoder then gets the same random numbers as the decoder of that
            column, so that both are augmented in the same way. None if it follows no other column.
        codec: Names and versions of the libraries that make the values. Checkpoints record them, and a resume with
            other codecs warns. "" by default, which is not recorded.
    """

    column: str
    channels_last, content = False, "encoded data"
    of_frames = False  # whether the column has frames of a `Video`, not bytes
    takes_lists = False  # whether a ragged decoder decodes each value of a list, one after another
    adds: ClassVar[tuple[str, ...]] = ()  # suffixes of the names of `companions`
    may_lack_samples = False  # whether a dataset may be opened if none of the sampled rows has a value
    is_companion = False  # whether it is one of them, which states do not hold
    has_marks = True  # whether batches say which values of a list are good, if bad ones are masked

    @property
    def companions(self) -> "Sequence[Decoder]":
        """Decoders that come with this one; none by default."""
        return ()

    if TYPE_CHECKING:
        # Not at run time: a dataclass would take these properties as the defaults of fields with the same names.
        @property
        def shape(self) -> tuple[int, ...]: ...  # noqa: D102
        @property
        def dtype(self) -> npt.DTypeLike: ...  # noqa: D102
        @property
        def codec(self) -> str: ...  # noqa: D102
        @property
        def like(self) -> str | None: ...  # noqa: D102
        @property
        def name(self) -> str | None: ...  # noqa: D102
        @property
        def draws(self) -> int: ...  # noqa: D102
    else:
        codec, like, name, draws = "", None, None, 0

    @abc.abstractmethod
    def open(self) -> RowDecoder:
        """Opens a row decoder: the object that decodes rows, one after another, in one thread. A decoder that keeps
        nothing between rows may return itself.
        """

    def open_group(self, others: Sequence[Self]) -> RowDecoderGroup | None:
        """Opens this decoder and `others` together, as one object that decodes rows in one thread.

        Args:
            others: Other decoders of the same class and column. Either all decoders of the group have a `like` that
                names a decoder of one other column, or none has.

        Returns:
            An object that decodes each row once for the whole group. None, the default, if the decoders of the group
            are to be opened one by one.
        """
        return None

    def resolve(self, encoded: memoryview) -> Self:
        """Returns this decoder with the settings that the user left open, such as a size, taken from a sampled row.
        Called when a dataset is opened.

        Args:
            encoded: The row's bytes.

        Returns:
            A decoder whose `shape` and `dtype` are known; by default this decoder.

        Raises:
            Exception: Any error, if the row is bad; then another row is tried.
        """
        return self

    def _found(self, **fields: Any) -> Self:
        """Returns a copy with these fields, which users do not construct: what is found when a dataset is opened."""
        made = copy.copy(self)
        getattr(made, "__dict__", {}).update(getattr(self, "__dict__", {}))  # `copy` leaves these out
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def of_type(self, kind: pa.DataType, leader: "Decoder | None") -> Self:
        """Returns this decoder for frames of an Arrow type; called instead of `resolve` and `follow` if `of_frames`."""
        raise NotImplementedError(f"{type(self).__name__} does not take frames.")

    def follow(self, other: "Decoder") -> Self:
        """Returns this decoder with settings taken over from `other`, the decoder that `like` names; by default as it
        is. Called when a dataset is opened.
        """
        return self

    @property
    def output_name(self) -> str:
        """Name of the decoded column."""
        return self.name or self.column

    @property
    def is_random(self) -> bool:
        """Whether the decoder augments at random, without taking the random numbers of another decoder. By default:
        whether `draws` is positive and `like` is None. If decoders of several columns are random, `raylance.dataset`
        warns that one row is augmented differently in these columns: a mask would get another crop than its image.
        """
        return self.draws > 0 and self.like is None

    @property
    def arrow_type(self) -> pa.DataType:
        """Arrow type of the decoded column: a fixed-shape tensor, or numbers."""
        return to_arrow(np.empty((0, *self.shape), self.dtype)).type


class RaggedRowDecoder(Protocol):
    """Decodes rows to arrays of any length; belongs to one thread, and may have what `RowDecoder` may."""

    def decode(self, encoded: memoryview, draws: Draws) -> npt.NDArray[Any]:
        """Decodes one row.

        Args:
            encoded: The row's bytes, read-only, valid until this returns.
            draws: Uniform numbers in [0, 1) of this seed, epoch and row, float64, shape (decoder.draws,).

        Returns:
            An array (length, *decoder.shape) of the decoder's dtype, which depends only on the arguments. The next call
            may reuse its memory.

        Raises:
            Exception: As `RowDecoder.decode_into`.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedDecoder(Decoder):
    """Setting that decodes a column of bytes to arrays whose first axis has a different length in each row: audio,
    text, event streams, video.

    The decoded column holds lists. Their form in a batch is chosen when batches are iterated: see `pad_lists` of
    `RankLoader.iter_torch_batches`. A masked row has an empty list.

    Attributes that differ from `Decoder`:
        shape: Shape of a row's array without its first axis; () if a row is a list of numbers.
    """

    @abc.abstractmethod
    def open(self) -> RaggedRowDecoder:  # type: ignore[override]
        """Opens a row decoder; see `Decoder.open`."""

    @property
    def arrow_type(self) -> pa.DataType:
        """Arrow type of the decoded column: lists of numbers, or of fixed-shape tensors."""
        return pa.list_(super(RaggedDecoder, self).arrow_type)


@dataclasses.dataclass(frozen=True, slots=True)
class CountedDecoder(RaggedDecoder):
    """A ragged decoder that knows the length of each array before it decodes, and decodes each value of a list. What it
    opens has `decode_into`, as a `RowDecoder` has.
    """

    takes_lists = may_lack_samples = True

    @abc.abstractmethod
    def count(self, encoded: memoryview | None) -> int:
        """Returns the length of the array of a value, which also a bad value has; 0 if it cannot be known."""


class OpenBatchDecoder(Protocol):
    """Decodes rows together; belongs to one thread. Like a `RowDecoder`, it may have `fallbacks`."""

    def decode_batch(self, encoded: Sequence[Any], draws: npt.NDArray[np.float64], out: Any) -> None:
        """Decodes n rows, at least one.

        The result for a row must depend only on its bytes and draws, not on the other rows, because the number of ranks
        and of decoders changes which rows are decoded together. If this method raises, it is called with each row
        alone, and the rows for which it raises again are bad rows.

        Args:
            encoded: The bytes of each row, read-only, valid until this returns: memoryviews; on a device, uint8 tensors
                (length,) on the CPU, in pinned memory if the device is CUDA.
            draws: Uniform numbers in [0, 1) of seed, epoch and row, float64, shape (n, decoder.draws).
            out: Memory for the rows, (n, *decoder.shape) of the decoder's dtype, not initialised; all of it must be
                written. An array; on a device, a tensor there, to be written on the device's current stream.

        Raises:
            Exception: As `RowDecoder.decode_into`.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class BatchDecoder(Decoder):
    """Setting that decodes several rows together, for codecs and models that are faster this way. A decode actor
    decodes the rows of an item together. With `on_device`, the trainer gets the encoded bytes, and its device decodes
    the rows of a batch together.

    Attributes, in addition to those of `Decoder`:
        on_device: Whether the rows are decoded in the trainer's process, on the device of its batches; False by
            default.
    """

    if TYPE_CHECKING:

        @property
        def on_device(self) -> bool: ...  # noqa: D102
    else:
        on_device = False

    @abc.abstractmethod
    def open(self) -> OpenBatchDecoder:  # type: ignore[override]
        """Opens a batch decoder, which decodes several rows together, in one thread; see `Decoder.open`."""

    def open_on(self, device: "torch.device") -> OpenBatchDecoder:
        """Opens a batch decoder for a device. Called in place of `open` if `on_device` is True; by default calls
        `open`.

        `device` may be the CPU, too, for the rows that a handle shows (`head`, `take`), the rows of NumPy batches, and
        those that are sampled when the dataset is opened.
        """
        return self.open()


def is_on_device(decoder: Decoder) -> TypeGuard[BatchDecoder]:
    """Returns whether the trainer decodes, on the device of its batches."""
    return isinstance(decoder, BatchDecoder) and decoder.on_device


def is_users(decoder: Decoder) -> bool:
    """Returns whether the user's own code decodes, so that an error may come from that code."""
    return not type(decoder).__module__.startswith("raylance.") or getattr(decoder, "decode_fn", None) is not None


def check_decoder_output(decoder: Decoder) -> None:
    """Raises ConfigError if no column can have a decoder's shape or dtype, or its `draws` is not a count."""
    name = f"{type(decoder).__name__}({decoder.column!r})"
    shape, dtype = getattr(decoder, "shape", None), getattr(decoder, "dtype", None)
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 1 for side in shape):
        raise ConfigError(f"{name}.shape={shape!r}: must be a tuple of integers of at least 1, () for a number.")
    with contextlib.suppress(TypeError):
        found = np.dtype(dtype)
        if dtype is not None and found.kind in "biuf" and found.itemsize <= 8 and found.isnative:
            check_integer(f"{name}.draws", decoder.draws, 0)
            return
    raise ConfigError(f"{name}.dtype={dtype!r}: must be a NumPy dtype of numbers or bool, in native byte order.")


def wrong_ragged(decoder: Decoder, made: Any) -> str:
    """Returns the text that follows "was decoded to" if a ragged decoder's result is wrong; "" if it is right."""
    wanted = np.dtype(decoder.dtype)
    if isinstance(made, np.ndarray) and (made.dtype, made.shape[1:]) == (wanted, decoder.shape) and made.ndim:
        return ""
    found = f"{made.dtype} {made.shape}" if isinstance(made, np.ndarray) else type(made).__name__
    must = f"must return an array of {wanted} {('length', *decoder.shape)}"
    return f"{found}: decode() of {type(decoder).__name__} {must}"
