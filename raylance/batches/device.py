"""The memory of a batch's tensors, pinned or on a device."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from raylance.errors import ConfigError

logger = logging.getLogger(__name__)


def torch_device(device: str | torch.device) -> torch.device:
    """Returns the device that a device argument names.

    Raises:
        ConfigError: If torch does not know the device, or finds no CUDA for it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is unknown to torch ({error}): use e.g. 'cpu' or 'cuda:0'.") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no CUDA here: use device='cpu', or check the driver.")
    return found


def can_pin(pin_memory: bool) -> bool:
    """Returns whether to put batches on the CPU into pinned memory: only if torch finds an accelerator."""
    if pin_memory and not torch.accelerator.is_available():
        _warn_of_no_pinning()
        return False
    return pin_memory


@functools.cache
def _warn_of_no_pinning() -> None:
    """Logs, once per process, that `pin_memory=True` has no effect without an accelerator."""
    logger.warning(
        "pin_memory=True, but torch finds no accelerator here: batches are not in pinned memory. Leave pin_memory= out "
        "on machines without an accelerator."
    )


class JaggedParts(NamedTuple):
    """The parts of a nested tensor, which holds lists of any length. The nested tensor is built after the move to the
    device, because its parts can be pinned and moved like any other tensor.
    """

    values: torch.Tensor  # (sum of lengths, …)
    offsets: torch.Tensor  # int64 (n + 1,)
    shortest: int
    longest: int

    @classmethod
    def of(cls, values: torch.Tensor, offsets: npt.NDArray[np.int64]) -> "JaggedParts":
        """Makes the parts from values, and from offsets in CPU memory."""
        lengths = np.diff(offsets)
        shortest = int(lengths.min()) if len(lengths) else 0
        return cls(values, torch.from_numpy(offsets), shortest, int(lengths.max(initial=0)))

    def build(self) -> torch.Tensor:
        """Builds the nested tensor of jagged layout, without a copy and without waiting for the device."""
        return torch.nested.nested_tensor_from_jagged(
            self.values, self.offsets, min_seqlen=self.shortest, max_seqlen=self.longest
        )


def build_jagged(batch: Any) -> Any:
    """Replaces `JaggedParts` by nested tensors in a dict by column, or in a list of them; other batches stay."""
    if isinstance(batch, list):
        return [build_jagged(each) for each in batch]
    if not isinstance(batch, dict) or not any(isinstance(value, JaggedParts) for value in batch.values()):
        return batch
    return {name: value.build() if isinstance(value, JaggedParts) else value for name, value in batch.items()}


def move(batch: Any, transfer: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies a transfer to every tensor in nested dicts, lists and tuples; keeps other values."""
    if isinstance(batch, torch.Tensor):
        return transfer(batch)
    if isinstance(batch, dict):
        return {key: move(value, transfer) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, transfer) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, transfer) for value in batch)
    return batch


class Sender:
    """Moves batches to a device.

    Batches reach a CUDA device through pinned memory, on a side stream. With `pin_memory`, batches that stay on the CPU
    are put into pinned memory, so that the caller can copy them to a device.

    The thread that makes batches calls `send`. The consumer calls `receive`, which makes the consumer's current CUDA
    stream wait for the copy.
    """

    def __init__(self, device: torch.device, pin_memory: bool) -> None:
        self._device, self._pins = device, pin_memory and device.type == "cpu"
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which all device work that makes a batch must run."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, batch: Any) -> Any:
        """Begins to move a batch; returns the argument of `receive`."""
        if self._stream is None:
            return move(batch, self._keep)
        with torch.cuda.stream(self._stream):
            sent = move(
                batch,
                lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory().to(self._device, non_blocking=True),
            )
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return sent, done

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._pins:
            return tensor.pin_memory()
        # `to` would release the GIL even if it has nothing to do.
        return tensor if tensor.device == self._device else tensor.to(self._device)

    def receive(self, sent: Any) -> Any:
        """Returns the batch, ready for work on the caller's current stream."""
        if self._stream is None:
            return build_jagged(sent)
        batch, done = sent
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)

        def hold(tensor: torch.Tensor) -> torch.Tensor:
            # The allocator must not give this memory to the side stream's next batch while the consumer still reads it.
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        return build_jagged(move(batch, hold))
