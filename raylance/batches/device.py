"""Owns where the tensors of a batch lie: pinned memory, a device; never makes a batch."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from raylance.errors import ConfigError

T = TypeVar("T")


def torch_device(device: str | torch.device) -> torch.device:
    """Reads a device argument.

    Raises:
        ConfigError: If torch knows no such device, or has no CUDA for it.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is unknown to torch ({error}): use e.g. 'cpu' or 'cuda:0'.") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no CUDA here: use device='cpu', or check the driver.")
    return found


def move(batch: Any, transfer: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies a transfer to every tensor in nested dicts, lists and tuples; leaves the rest as it is."""
    if isinstance(batch, torch.Tensor):
        return transfer(batch)
    if isinstance(batch, dict):
        return {key: move(value, transfer) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, transfer) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, transfer) for value in batch)
    return batch


def on_device(batches: Iterator[tuple[Any, T]], device: torch.device, pin_memory: bool) -> Iterator[tuple[Any, T]]:
    """Moves batches to a device; on CUDA through pinned memory, on a side stream, one batch ahead of the consumer.

    Args:
        batches: Batches, each with a tag that stays beside it.
        device: Where to.
        pin_memory: Whether batches that stay on the CPU are put into pinned memory, for the caller's own transfer.

    Yields:
        The batches in order, ready for the consumer's current stream.
    """
    if device.type != "cuda":
        for batch, tag in batches:
            yield move(batch, lambda t: t.pin_memory() if pin_memory else t.to(device)), tag
        return
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send() -> Iterator[tuple[Any, T, torch.cuda.Event]]:
        for batch, tag in batches:
            with torch.cuda.stream(stream):
                sent = move(batch, lambda t: t.pin_memory().to(device, non_blocking=True))
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(stream)
            yield sent, tag, done

    for sent, tag, done in one_ahead(send()):
        yield _arrived(sent, tag, done)


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Takes the next item before it hands one out; an error of the next one waits until that is done."""
    held = list(itertools.islice(items, 1))
    while held:
        following: list[T] = []
        error: Exception | None = None
        try:
            following = list(itertools.islice(items, 1))
        except Exception as raised:  # of whatever kind: the item before it is good
            error = raised
        yield held[0]
        if error is not None:
            raise error
        held = following


def _arrived(batch: Any, tag: T, done: "torch.cuda.Event") -> tuple[Any, T]:
    current = torch.cuda.current_stream()
    current.wait_event(done)

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        # The allocator must not give this memory to the side stream's next batch while the consumer still reads it.
        if tensor.is_cuda:
            tensor.record_stream(current)
        return tensor

    return move(batch, hold), tag
