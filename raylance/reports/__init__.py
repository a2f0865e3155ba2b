"""The report, the progress line and the table of a run, made from its records."""
