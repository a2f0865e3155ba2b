"""Owns what happens to rows between reading and batches; never reads storage, never knows an epoch's plan."""
