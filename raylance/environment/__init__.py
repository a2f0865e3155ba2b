"""Owns what raylance asks of its surroundings: Ray's session and object store, Ray Train, directories; starts none."""
