"""The side-by-side measurement of raylance and its peers."""
