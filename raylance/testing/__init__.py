"""Checks of custom orders and decoders, which also check raylance's own ones."""

from raylance.testing.decoders import check_decoder
from raylance.testing.orders import SampleRows, check_order

__all__ = ["SampleRows", "check_decoder", "check_order"]
