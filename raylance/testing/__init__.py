"""Owns the checkers that orders and decoders of others are tested with, as raylance's own are; never part of a run."""

from raylance.testing.decoders import check_decoder
from raylance.testing.orders import SampleRows, check_order

__all__ = ["SampleRows", "check_decoder", "check_order"]
