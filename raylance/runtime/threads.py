"""Owns the runtime whose helpers are threads of this process, for use without Ray; never assigns work to helpers.

The batches are those of the Ray runtime; only the helpers differ.

To end a helper, the runtime drops it, and its thread ends by itself. The threads are daemons, so that a thread that
waits for hanging storage does not delay the end of the process.
"""

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from raylance.decode.rows import OpenDecoding
from raylance.dispatch.messages import Alive, Decode, Done, Failed, Fetch, Fetched, Kind, Prefetch, Read
from raylance.observe import Receipt
from raylance.read_spec import ReadSpec
from raylance.runtime.rank_reader import RankReader
from raylance.runtime.runtime import Runtime
from raylance.settings import Options
from raylance.source.limits import Calls

_MAX_AUTO_DECODERS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class _Helper:
    thread: Calls
    works_with: Any  # a RankReader, or an OpenDecoding

    def end(self, *, is_dead: bool) -> None:
        if isinstance(self.works_with, RankReader):
            self.works_with.close()


class ThreadRuntime(Runtime):
    """Does the work of one loader in threads: readers, and decoders ("auto": one for each CPU, at most 32)."""

    needs_decoder = True

    def __init__(self, read_spec: ReadSpec, options: Options) -> None:
        super().__init__(read_spec, options)
        self._lock, self._decoding = threading.RLock(), read_spec.in_helpers

    def count_decoders(self) -> tuple[int, int, int]:
        """See `Runtime.count_decoders`."""
        least, most = self._options.decoder_range
        if self._options.num_decoders == "auto":  # idle threads cost nothing
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            least = most = min(cpus, _MAX_AUTO_DECODERS)
        return least, least, most

    def explain_placing(self, kind: Kind, pending: int, asked: int) -> str:
        """See `Runtime.explain_placing`."""
        return f"{pending} of {asked} {kind} threads did not start. No batch can follow. Ask for fewer of them."

    def _place(self, number: int, kind: Kind) -> None:
        reads, decoding = kind == "reader", self._decoding
        works_with: RankReader | OpenDecoding | None = None
        if reads:
            works_with = RankReader(self._read_spec, self._options, own_memory=True)
        elif decoding is not None:
            works_with = OpenDecoding(decoding)
        self._helpers[number] = _Helper(Calls(1, f"raylance-{kind}-{number}"), works_with)
        self.post(Alive(number))

    def _ping(self, number: int) -> None:
        self._helpers[number].thread.start(self._inbox.put, Alive(number))

    def _read(self, command: Read) -> None:
        reader, (key, plan) = self._helpers[command.helper].works_with, self._plan  # next pass may have another plan

        def read() -> tuple[tuple[pa.Table, ...], Receipt]:
            reader.install(key, plan)
            plain, second, receipt = reader.read(key, command)
            return (plain, second), receipt

        self._submit(command, read)

    def _prefetch(self, command: Prefetch) -> None:
        reader, (key, plan) = self._helpers[command.helper].works_with, self._plan

        def begin() -> None:
            reader.install(key, plan)
            reader.begin(key, command.dp_rank, command.chunk)  # the first read raises its errors again

        self._helpers[command.helper].thread.start(begin)

    def _decode(self, command: Decode) -> None:
        opened, (_, encoded) = self._helpers[command.helper].works_with, self._results[command.source]

        def decode() -> tuple[tuple[pa.Table, ...], Receipt]:
            table, receipt = opened.apply(encoded, command.epoch, own_memory=True, given_up=command.given_up)
            return (table,), receipt

        self._submit(command, decode)

    def _submit(self, command: Read | Decode, work: Callable[[], tuple[tuple[pa.Table, ...], Receipt]]) -> None:
        call, inbox, results, lock = command.call, self._inbox, self._results, self._lock  # `run` must not hold `self`
        results[call] = None

        def run() -> None:
            receipt = Receipt()
            try:
                if call in results:  # else `Forget` came first
                    tables, receipt = work()
                    with lock:
                        if call in results:
                            results[call] = tables
                inbox.put(Done(call, receipt))
            except BaseException as error:  # a panic in Lance's Rust code is not an Exception
                inbox.put(Failed(call, error))

        self._helpers[command.helper].thread.start(run)

    def _fetch(self, command: Fetch) -> None:
        plain, decoded = self._results[command.read]
        if command.decode is not None:
            (decoded,) = self._results[command.decode]
        self.post(Fetched(command.call, plain, None if self._decoding is None else decoded))

    def _forget(self, calls: Iterable[int]) -> None:
        with self._lock:
            super()._forget(calls)
