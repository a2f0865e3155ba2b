"""What models without padding take of packed tokens."""

from raylance.batches.varlen import cu_seqlens

__all__ = ["cu_seqlens"]
