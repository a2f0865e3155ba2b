"""Owns the runtime that works by Ray actors: all that raylance asks of Ray, but for Ray Train; never decides."""
