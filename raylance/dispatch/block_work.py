"""Has the blocks of chunks decoded: each once, by decoders as items are, and again after a fault."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raylance.dispatch.chunk_order import Block, HeldChunk
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.load_ahead import ChunkTable
from raylance.dispatch.messages import DecodeBlock, Done, Failed, Fault, Faulted, Output
from raylance.dispatch.suspects import Advice, Suspects
from raylance.observe.observations import FaultSeen, WorkDone


class Search(NamedTuple):
    """What may have ended its helper: a block; with the chunk if its reader has decoded it, with which all is gone."""

    block: Block
    held: HeldChunk | None


class BlockWork:
    """The work on blocks. It outlives passes, as the chunks do."""

    def __init__(self, pool: HelperPool, chunks: ChunkTable, suspects: Suspects) -> None:
        self._pool, self._chunks, self._suspects = pool, chunks, suspects
        self._by_call: dict[int, Block] = {}
        self._known_bad: dict[int, str] = {}  # rows that were given up, by their offsets, and why

    def send(self, now: float) -> Iterator[Output]:
        """Yields the commands for blocks that helpers can begin."""
        decodes_there, readers = self._pool.reader_decodes(now), self._pool.running("reader")
        if not decodes_there:
            self._divide(len(self._pool.running("decoder")))
        blocks = self._chunks.blocks()
        waiting = [block for block in blocks if block.call is None]
        # Suspect rows come first, as for items; and one after another: once a frame of a video is known to be bad,
        # those that are made of it are not tried.
        searches = any(block.call is not None and block.suspicion.is_searched for block in blocks)
        for block in sorted(waiting, key=lambda block: block.suspicion.rank):
            held, is_searched = block.held, block.suspicion.is_searched
            if is_searched and searches:
                continue
            if held.reader not in readers or (block.suspicion.waits and self._has_others(block)):
                continue
            helper: int | None = held.reader
            if not decodes_there:
                is_hit = block.suspicion.faults + block.suspicion.deaths > 0
                helper = self._pool.decoder(responsive=is_hit, fresh=block.suspicion.needs_fresh(block.rows))
            elif not self._pool.has_room(held.reader):
                helper = None
            if helper is not None:
                block.call, searches = self._pool.send(helper, now), searches or is_searched
                self._by_call[block.call] = block
                given_up = block.suspicion.given_up or held.trouble.suspicion.given_up
                rows = block.first, block.low, block.high
                known_bad = tuple(self._known_bad.items())
                yield DecodeBlock(
                    block.call, helper, held.reader, held.number, block.source, *rows, given_up, known_bad
                )

    def _divide(self, decoders: int) -> None:
        """Divides the block of a chunk that one load has brought whole among all decoders: such chunks are small, and a
        consumer waits for them.
        """
        for block in self._chunks.blocks():
            is_alone = (block.first, block.low, block.high) == (0, 0, block.held.loading.stored_rows)
            if is_alone and block.call is None and decoders > 1 and block.rows > 1:
                block.cut(min(decoders, block.rows))

    def answered(self, event: Done | Failed | Faulted, now: float) -> list[Output] | None:
        """Takes the answer to a call; returns what follows. None if the call was not about a block."""
        block = self._by_call.pop(event.call, None)
        if block is None:
            return None
        block.call = None
        self._learn(block, event)
        match event:
            case Done(_, receipt):
                self._suspects.has_decoded = True
                for other in self._chunks.blocks():
                    other.suspicion.waits = False
                if not block.is_kept:
                    return [WorkDone(receipt, 0)]
                self._chunks.block_done(block)
                return [WorkDone(receipt, block.rows)]
            case Failed(_, error) if block.is_kept:
                self._chunks.block_failed(block, error)
            case Faulted(_, fault) if block.is_kept:
                self._chunks.block_lost(block, fault, now)  # what was loaded may be gone
                line = f"a block is loaded and decoded again after a fault of the machines ({fault.what})"
                return [FaultSeen(line), *self._pool.ping(now)]
        return []

    def _learn(self, block: Block, event: Done | Failed | Faulted) -> None:
        """Keeps which row was given up: its chunk may be loaded again in parts, and in later epochs."""
        held = block.held  # what is known of a chunk is known of its row, if it has one
        why = block.suspicion.given_up or (held.trouble.suspicion.given_up if held.loading.stored_rows == 1 else "")
        if not why:
            return
        if isinstance(event, Done):
            self._known_bad |= {offset: why for offset, _, _ in event.receipt.bad_rows}
        elif isinstance(event, Failed) and (offset := getattr(event.error, "joined_offset", None)) is not None:
            self._known_bad[offset] = why

    def lost(self, helper: int, calls: Sequence[int], fault: Fault) -> "Search | None":
        """Takes the calls that a helper has not answered, which is gone. Returns what to search for a row that may be
        the cause, once it is known that the chunks of the helper are gone, too.
        """
        blocks = [(call, block) for call in calls if (block := self._by_call.pop(call, None)) is not None]
        for _, block in blocks:
            block.call = None
        # The helper worked only on its first call, which may belong to another loader.
        if not blocks or blocks[0][0] != calls[0] or fault.is_of_others or not blocks[0][1].is_kept:
            return None
        _, block = blocks[0]
        return Search(block, block.held if block.held.reader == helper else None)

    def search(self, found: "Search", fault: Fault) -> str:
        """Searches a block, or a chunk, see `Suspects`. Returns why the pass ends, if it does; else ""."""
        block, held = found
        known, rows = (block.suspicion, block.rows) if held is None else (held.trouble.suspicion, held.rows)
        if not fault.may_be_rows:
            self._chunks.hit(block.held, known, fault)
            return ""
        waiting = sum(other.suspicion.waits for other in self._chunks.blocks())
        has_others = held is None and self._has_others(block)
        advice = self._suspects.after_death(known, steps=1, rows=rows, waiting=waiting, has_others=has_others)
        why = f"ended the process of its decoder {known.deaths} times ({fault.what})"
        match advice:
            case Advice.HALVES if held is not None:
                self._chunks.halve(held)
            case Advice.HALVES:
                block.cut(2)
            case Advice.BAD:
                known.given_up = f"it {why}"
            case Advice.END:
                return f"{why}, and no other row was decoded so far"
        return ""

    def _has_others(self, than: Block) -> bool:
        """Whether other rows are here, or come, with which decoders may show that they work."""
        return any(other is not than and not other.suspicion.waits for other in self._chunks.blocks())
