"""The actor that decodes. It does not load what reads."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import ray

from raylance.decode.block_decoding import HelperDecoding
from raylance.decode.block_rows import BlockRows, LoadedRows
from raylance.decode.decoding import Decoding
from raylance.decode.pixels import set_up_process
from raylance.memory.lending import FadingLender
from raylance.observe import Receipt
from raylance.runtime.ray.actors import Actor
from raylance.runtime.ray.faults import errors_travel


class DecodeActor(Actor):
    """Decodes for all loaders of the worker process that owns it."""

    def __init__(self) -> None:
        import torch  # noqa: F401 - most decoders need it; it loads while the first rows are read

        super().__init__()
        set_up_process()
        self._decodings: dict[str, HelperDecoding] = {}
        self._lender = FadingLender()

    def forget(self, key: str) -> None:
        """Drops the decoding of a loader, and the decoding's output memory."""
        self._decodings.pop(key, None)

    @ray.method(num_returns=2)
    def decode(
        self,
        key: str,
        decoding: Decoding | None,
        epoch: int,
        encoded: pa.Table,
        given_up: str = "",
        firsts: Sequence[int] = (),
        *blocks: pa.Table,
    ) -> tuple[pa.Table, Receipt]:
        """Decodes an item of the loader with this key; `decoding` comes until a call of the loader was done. `blocks`
        are those of its chunk that were decoded, if a transform needs them, and `firsts` the numbers of their first
        rows.
        """
        with errors_travel():
            if blocks:
                made = self._opened(key, decoding).names_by_column
                encoded = BlockRows(map(LoadedRows, firsts, blocks), made).fill_in(encoded, self._lender.lend)
            return self._opened(key, decoding).decode(encoded, epoch, given_up=given_up)

    @ray.method(num_returns=2)
    def decode_block(
        self, key: str, decoding: Decoding | None, encoded: pa.Table, **how: Any
    ) -> tuple[pa.Table, Receipt]:
        """Decodes rows of a block, see `BlockDecoding.apply`; otherwise as `decode`."""
        with errors_travel():
            return self._opened(key, decoding).decode_block(encoded, **how)

    def _opened(self, key: str, decoding: Decoding | None) -> HelperDecoding:
        if decoding is not None and key not in self._decodings:
            self._decodings[key] = HelperDecoding(decoding)
        return self._decodings[key]
