"""Owns the report, the progress line and the table of a run, made from its records; never takes part in a run."""
