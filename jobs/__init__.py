"""Jobs that run by hand and under a job server."""
