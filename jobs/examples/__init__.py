"""Owns one short program for each guide of Ray Train and each framework; `docs/frameworks.md` lists them."""
