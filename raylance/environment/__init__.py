"""raylance's use of its surroundings: Ray's session and object store, Ray Train, directories."""
