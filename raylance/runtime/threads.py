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

from raylance.decode.block_decoding import HelperDecoding
from raylance.decode.block_rows import BlockRows, LoadedRows
from raylance.dispatch.messages import (
    Alive,
    Decode,
    DecodeBlock,
    Done,
    Drop,
    Event,
    Failed,
    Fetch,
    Gather,
    Kind,
    Load,
    Loaded,
)
from raylance.memory.lending import Bytes, Lend, LendFor
from raylance.observe import Receipt
from raylance.opened import ReadSpec
from raylance.runtime.runtime import Arrived, Runtime
from raylance.settings import MAX_AUTO_DECODERS, Options
from raylance.source.limits import Calls
from raylance.work.blocks import BlockColumns
from raylance.work.read_work import ReadWork


class _Blocks:
    """The decoded blocks of one chunk, in one piece of memory for each column whose values have one size.

    Attributes:
        tables: The blocks, by the number of the first row.
        stored_rows: Number of the chunk's stored rows, once a load is answered.
    """

    def __init__(self, lend: Lend) -> None:
        self.tables: dict[int, pa.Table] = {}
        self.stored_rows = 0
        self._lend, self._memory, self._lock = lend, dict[str, Bytes](), threading.Lock()
        self._rows: BlockRows | None = None

    def memory_of(self, low: int, high: int) -> LendFor:
        """Returns what gives the memory of the stored rows [low, high)."""

        def lend(name: str, nbytes: int) -> Bytes:
            width = nbytes // max(1, high - low)
            with self._lock:
                if name not in self._memory:
                    self._memory[name] = self._lend(self.stored_rows * width)[: self.stored_rows * width]
                return self._memory[name][low * width : high * width]

        return lend

    def rows(self, columns: BlockColumns) -> BlockRows:
        """Returns the rows; only after all blocks were decoded."""
        if self._rows is None:
            blocks = [LoadedRows(*each) for each in self.tables.items()]
            self._rows = BlockRows(blocks, columns.decoded, self._memory)
        return self._rows


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    work: ReadWork
    thread: Calls
    loads: Calls  # beside the other calls, as `Load` allows it
    blocks: dict[int, _Blocks] = dataclasses.field(default_factory=dict)  # by number of the chunk

    def end(self, *, is_dead: bool) -> None:
        self.work.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Decoder:
    work: HelperDecoding
    thread: Calls

    def end(self, *, is_dead: bool) -> None: ...


class ThreadRuntime(Runtime):
    """Does the work of one loader in threads: readers, and decoders ("auto": one for each CPU, at most 32)."""

    needs_decoder = gives_away = True
    fetches_from_chunks = False

    def __init__(self, read_spec: ReadSpec, options: Options) -> None:
        super().__init__(read_spec, options)
        self._lock, self._decoding = threading.RLock(), read_spec.in_helpers
        self._by_block = BlockColumns.of(read_spec, sends=False)  # in one process, nothing is sent

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
            work = ReadWork(self._read_spec, self._options, own_memory=True, by_block=self._by_block)
            self._helpers[number] = _Reader(work, thread, Calls(2, f"raylance-load-{number}"))
        elif self._decoding is not None:
            self._helpers[number] = _Decoder(HelperDecoding(self._decoding), thread)
        self.post(Alive(number))

    def _ping(self, number: int) -> None:
        self._helpers[number].thread.submit(self._inbox.put, Alive(number))

    def _load(self, command: Load) -> None:
        reader, (_, planned) = self._helpers[command.helper], self._plan  # next pass may have another plan
        call, results, lock = command.call, self._results, self._lock
        for number in command.drops:
            reader.blocks.pop(number, None)
        if self._by_block.decoded:
            results[call] = None
            reader.blocks.setdefault(command.number, _Blocks(reader.work.lend_for_chunk))

        def load() -> Event:
            loaded: Loaded
            loaded, tables = reader.work.load(planned, command)
            if (blocks := reader.blocks.get(command.number)) is not None:
                blocks.stored_rows = loaded.stored_rows
            _keep(results, lock, call, tables)
            return loaded

        reader.loads.submit(_answer, self._inbox, call, load)

    def _drop(self, command: Drop) -> None:
        self._helpers[command.helper].work.drop(command.number)
        self._helpers[command.helper].blocks.pop(command.number, None)

    def _gather(self, command: Gather) -> None:
        reader, (_, planned), columns = self._helpers[command.helper], self._plan, self._by_block
        blocks = None if command.number is None else reader.blocks.get(command.number)

        def fill_in(items: pa.Table) -> pa.Table:
            return items if blocks is None else blocks.rows(columns).fill_in(items, reader.work.lend)

        def gather() -> tuple[tuple[pa.Table, ...], Receipt]:
            (plain, *others), receipt = reader.work.gather(planned, command, fill_in)
            return (fill_in(plain), *others), receipt

        self._submit(command, gather)

    def _decode(self, command: Decode | DecodeBlock) -> None:
        if isinstance(command, DecodeBlock):
            self._decode_block(command)
            return
        decoder, (_, encoded) = self._helpers[command.helper], self._results[command.source]

        def decode() -> tuple[tuple[pa.Table, ...], Receipt]:
            table, receipt = decoder.work.decode(encoded, command.epoch, own_memory=True, given_up=command.given_up)
            return (table,), receipt

        self._submit(command, decode)

    def _decode_block(self, command: DecodeBlock) -> None:
        helper, (encoded,) = self._helpers[command.helper], self._results[command.source]
        held, number = self._helpers[command.reader].blocks, command.number
        blocks = held[number]

        def decode() -> Event:
            receipt = Receipt()
            if held.get(number) is blocks:  # else the chunk was dropped
                low, first = command.low, command.first + command.low
                memory = blocks.memory_of(first, first + command.high - low)
                table, receipt = helper.work.decode_block(encoded, lend=memory, **command.how)
                blocks.tables[first] = table
            return Done(command.call, receipt)

        helper.thread.submit(_answer, self._inbox, command.call, decode)

    def _submit(self, command: Gather | Decode, work: Callable[[], tuple[tuple[pa.Table, ...], Receipt]]) -> None:
        call, results, lock = command.call, self._results, self._lock  # `run` must not hold `self`
        results[call] = None

        def run() -> Event:
            receipt = Receipt()
            if call in results:  # else `Forget` came first
                tables, receipt = work()
                _keep(results, lock, call, tables)
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


def _keep(results: dict[int, Any], lock: threading.RLock, call: int, made: Any) -> None:
    """Keeps the result of a call, unless it was forgotten."""
    with lock:
        if call in results:
            results[call] = made


def _answer(inbox: "queue.SimpleQueue[Any]", call: int, work: Callable[[], Event]) -> None:
    """Posts the answer to a call. It holds no runtime."""
    try:
        inbox.put(work())
    except BaseException as error:  # a panic in Lance's Rust code is not an Exception
        inbox.put(Failed(call, error))
