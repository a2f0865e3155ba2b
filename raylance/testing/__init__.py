"""Checks of custom orders, decoders and tables of samples, which also check raylance's own ones."""

from raylance.testing.decoders import check_decoder
from raylance.testing.orders import SampleRows, check_order
from raylance.testing.samples import check_samples

__all__ = ["SampleRows", "check_decoder", "check_order", "check_samples"]
