"""The checks and figures of raylance on a GPU."""
