"""Owns what raylance asks of its surroundings: Ray's session and object store, directories; never starts any."""
