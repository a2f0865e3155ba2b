"""Owns `dataset()`, `mix()` and the handle that they return; never reads rows for training itself."""
