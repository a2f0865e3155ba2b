"""Owns what a run shows of itself, from its records: a report, a progress line, a table; never takes part in one."""
