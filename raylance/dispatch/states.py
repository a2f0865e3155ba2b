"""The legal states of all that has states, and which state may follow which; anything else is a defect."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar

from raylance.errors import RaylanceError


class ItemState(Enum):
    """The states of the work on an item."""

    WAITING = auto()  # for room, for its chunk, or for a pause to end
    GATHERING = auto()
    GATHERED = auto()  # waiting for a decoder
    DECODING = auto()
    DONE = auto()
    FETCHING = auto()
    FAILED = auto()  # the pass ends at this item
    GONE = auto()  # delivered, or replaced by parts


class ChunkState(Enum):
    """The states of a chunk."""

    PLANNED = auto()  # nothing of it was asked for
    LOADING = auto()  # some rows were asked for, or all
    LOADED = auto()
    FAILED = auto()  # its rows cannot be loaded: the pass ends at their item
    DROPPED = auto()


class HelperState(Enum):
    """The states of a helper."""

    WANTED = auto()  # its place is requested at a given time
    STARTING = auto()
    RUNNING = auto()
    GONE = auto()


class PassState(Enum):
    """The states of a pass."""

    RUNNING = auto()
    COMPLETE = auto()  # all items were delivered
    FAILED = auto()
    CLOSED = auto()  # it was ended from outside


class LoaderState(Enum):
    """The states of a loader."""

    NEW = auto()
    PLACED = auto()  # a state was loaded, or the training function has chosen the position
    BEGUN = auto()  # a pass has begun


class DeliveryState(Enum):
    """The states of a pass as the consumer of its batches sees it."""

    NEW = auto()  # nothing is checked or started before the first batch
    TAKING = auto()  # the next batch is taken from the feeder of the last one
    BETWEEN = auto()  # the next batch is of another share, or was taken back, and so needs another feeder
    OVER = auto()


_ITEM, _CHUNK, _HELPER, _PASS = ItemState, ChunkState, HelperState, PassState
_LOADER, _DELIVERY = LoaderState, DeliveryState
CHANGES: Mapping[Enum, frozenset[Enum]] = {
    # Any work may be lost or found wrong: then the item waits again, is replaced by parts, or fails.
    _ITEM.WAITING: frozenset({_ITEM.GATHERING, _ITEM.FAILED, _ITEM.GONE}),
    _ITEM.GATHERING: frozenset({_ITEM.GATHERED, _ITEM.DONE, _ITEM.WAITING, _ITEM.FAILED}),
    _ITEM.GATHERED: frozenset({_ITEM.DECODING, _ITEM.WAITING, _ITEM.FAILED}),
    _ITEM.DECODING: frozenset({_ITEM.DONE, _ITEM.GATHERED, _ITEM.WAITING, _ITEM.FAILED}),
    _ITEM.DONE: frozenset({_ITEM.FETCHING, _ITEM.WAITING, _ITEM.FAILED}),
    _ITEM.FETCHING: frozenset({_ITEM.GONE, _ITEM.WAITING, _ITEM.FAILED}),
    _ITEM.FAILED: frozenset(),
    _ITEM.GONE: frozenset(),
    _CHUNK.PLANNED: frozenset({_CHUNK.LOADING, _CHUNK.FAILED, _CHUNK.DROPPED}),
    # PLANNED again: its reader was lost, a load has failed by a machine fault, or its room was needed.
    _CHUNK.LOADING: frozenset({_CHUNK.LOADED, _CHUNK.FAILED, _CHUNK.PLANNED, _CHUNK.DROPPED}),
    _CHUNK.LOADED: frozenset({_CHUNK.PLANNED, _CHUNK.DROPPED}),
    # PLANNED again: an item waits for it, or another pass begins.
    _CHUNK.FAILED: frozenset({_CHUNK.PLANNED, _CHUNK.DROPPED}),
    _CHUNK.DROPPED: frozenset(),
    _HELPER.WANTED: frozenset({_HELPER.STARTING, _HELPER.GONE}),
    _HELPER.STARTING: frozenset({_HELPER.RUNNING, _HELPER.GONE}),
    _HELPER.RUNNING: frozenset({_HELPER.GONE}),
    _HELPER.GONE: frozenset(),
    _PASS.RUNNING: frozenset({_PASS.COMPLETE, _PASS.FAILED, _PASS.CLOSED}),
    _PASS.COMPLETE: frozenset({_PASS.CLOSED}),  # also if its last batches fail
    _PASS.FAILED: frozenset({_PASS.CLOSED}),
    _PASS.CLOSED: frozenset(),
    _LOADER.NEW: frozenset({_LOADER.PLACED, _LOADER.BEGUN}),
    _LOADER.PLACED: frozenset({_LOADER.BEGUN}),
    _LOADER.BEGUN: frozenset(),
    _DELIVERY.NEW: frozenset({_DELIVERY.TAKING, _DELIVERY.OVER}),
    _DELIVERY.TAKING: frozenset({_DELIVERY.BETWEEN, _DELIVERY.OVER}),
    _DELIVERY.BETWEEN: frozenset({_DELIVERY.TAKING, _DELIVERY.OVER}),
    _DELIVERY.OVER: frozenset(),
}

State = TypeVar("State", ItemState, ChunkState, HelperState, PassState, LoaderState, DeliveryState)


def change(before: State, after: State) -> State:
    """Returns the state `after`.

    Raises:
        RaylanceError: If it may not follow `before`, which is a defect.
    """
    if after not in CHANGES[before]:
        raise RaylanceError(
            f"{after} after {before}, which cannot happen; the pass stops here, and the batches before it are good. "
            "This is a defect of raylance: please report it."
        )
    return after
