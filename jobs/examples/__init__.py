"""Owns one short program for each guide of Ray Train and each framework; `docs/guide.md` tells which shows what."""
