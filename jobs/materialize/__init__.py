"""Owns the making of a filtered, shuffled or grouped copy of a Lance dataset; `command` is where it starts."""
