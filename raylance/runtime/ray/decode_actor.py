"""The actor that decodes. It does not load what reads."""

import pyarrow as pa
import ray

from raylance.decode.decoding import Decoding
from raylance.decode.open_decoding import OpenDecoding
from raylance.decode.pixels import set_up_process
from raylance.observe import Receipt
from raylance.runtime.ray.actors import Actor
from raylance.runtime.ray.faults import errors_travel


class DecodeActor(Actor):
    """Decodes for all loaders of the worker process that owns it."""

    def __init__(self) -> None:
        import torch  # noqa: F401 - most decoders need it; it loads while the first rows are read

        super().__init__()
        set_up_process()
        self._decodings: dict[str, OpenDecoding] = {}

    def forget(self, key: str) -> None:
        """Drops the decoding of a loader, and the decoding's output memory."""
        self._decodings.pop(key, None)

    @ray.method(num_returns=2)
    def decode(
        self, key: str, decoding: Decoding | None, epoch: int, encoded: pa.Table, given_up: str = ""
    ) -> tuple[pa.Table, Receipt]:
        """Decodes an item of the loader with this key; `decoding` comes until a call of the loader was done."""
        with errors_travel():
            if decoding is not None and key not in self._decodings:
                self._decodings[key] = OpenDecoding(decoding)
            return self._decodings[key].apply(encoded, epoch, given_up=given_up)
