"""The runtime whose helpers are threads of this process, for use without Ray.

The batches are those of the Ray runtime; only the helpers differ.

To end a helper, the runtime drops it, and its thread ends by itself. The threads are daemons, so that a thread that
waits for hanging storage does not delay the end of the process.
"""

import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from raylance.decode.open_decoding import OpenDecoding
from raylance.dispatch.messages import Alive, Decode, Done, Drop, Event, Failed, Fetch, Gather, Kind, Load
from raylance.observe import Receipt
from raylance.read_spec import ReadSpec
from raylance.runtime.runtime import Arrived, Runtime
from raylance.settings import MAX_AUTO_DECODERS, Options
from raylance.source.limits import Calls
from raylance.work.read_work import ReadWork


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    work: ReadWork
    thread: Calls
    loads: Calls  # beside the other calls, as `Load` allows it

    def end(self, *, is_dead: bool) -> None:
        self.work.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Decoder:
    work: OpenDecoding
    thread: Calls

    def end(self, *, is_dead: bool) -> None: ...


class ThreadRuntime(Runtime):
    """Does the work of one loader in threads: readers, and decoders ("auto": one for each CPU, at most 32)."""

    needs_decoder = gives_away = True
    fetches_from_chunks = False

    def __init__(self, read_spec: ReadSpec, options: Options) -> None:
        super().__init__(read_spec, options)
        self._lock, self._decoding = threading.RLock(), read_spec.in_helpers

    def count_decoders(self) -> tuple[int, int, int]:
        """See `Runtime.count_decoders`."""
        least, most = self._options.decoder_range
        if self._options.num_decoders == "auto":  # idle threads cost nothing
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            least = most = min(cpus, MAX_AUTO_DECODERS)
        return least, least, most

    def explain_placing(self, kind: Kind, pending: int, asked: int) -> str:
        """See `Runtime.explain_placing`."""
        return f"{pending} of {asked} {kind} threads did not start. No batch can follow. Ask for fewer of them."

    def _place(self, number: int, kind: Kind) -> None:
        thread = Calls(1, f"raylance-{kind}-{number}")
        if kind == "reader":
            work, loads = ReadWork(self._read_spec, self._options, own_memory=True), Calls(2, f"raylance-load-{number}")
            self._helpers[number] = _Reader(work, thread, loads)
        elif self._decoding is not None:
            self._helpers[number] = _Decoder(OpenDecoding(self._decoding), thread)
        self.post(Alive(number))

    def _ping(self, number: int) -> None:
        self._helpers[number].thread.submit(self._inbox.put, Alive(number))

    def _load(self, command: Load) -> None:
        reader, (_, planned) = self._helpers[command.helper], self._plan  # next pass may have another plan
        reader.loads.submit(_answer, self._inbox, command.call, lambda: reader.work.load(planned, command)[0])

    def _drop(self, command: Drop) -> None:
        self._helpers[command.helper].work.drop(command.number)

    def _gather(self, command: Gather) -> None:
        reader, (_, planned) = self._helpers[command.helper], self._plan
        self._submit(command, lambda: reader.work.gather(planned, command))

    def _decode(self, command: Decode) -> None:
        decoder, (_, encoded) = self._helpers[command.helper], self._results[command.source]

        def decode() -> tuple[tuple[pa.Table, ...], Receipt]:
            table, receipt = decoder.work.apply(encoded, command.epoch, own_memory=True, given_up=command.given_up)
            return (table,), receipt

        self._submit(command, decode)

    def _submit(self, command: Gather | Decode, work: Callable[[], tuple[tuple[pa.Table, ...], Receipt]]) -> None:
        call, results, lock = command.call, self._results, self._lock  # `run` must not hold `self`
        results[call] = None

        def run() -> Event:
            receipt = Receipt()
            if call in results:  # else `Forget` came first
                tables, receipt = work()
                with lock:
                    if call in results:
                        results[call] = tables
            return Done(call, receipt)

        self._helpers[command.helper].thread.submit(_answer, self._inbox, call, run)

    def _fetch(self, command: Fetch) -> None:
        plain, *decoded = self._results[command.gathered]
        if command.decode is not None:
            decoded = self._results[command.decode]
        self._results[command.call] = plain, *decoded
        self._inbox.put(Arrived(command.call))

    def _forget(self, calls: Iterable[int]) -> None:
        with self._lock:
            super()._forget(calls)


def _answer(inbox: "queue.SimpleQueue[Any]", call: int, work: Callable[[], Event]) -> None:
    """Posts the answer to a call. It holds no runtime."""
    try:
        inbox.put(work())
    except BaseException as error:  # a panic in Lance's Rust code is not an Exception
        inbox.put(Failed(call, error))
