"""The making of batches: assembly, conversion, move to the device."""
