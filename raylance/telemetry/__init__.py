"""Owns the public name `raylance.telemetry.metrics` of earlier versions; nothing else."""
