"""Owns the decisions: which helper does what, what is done again, what must wait; never does any of it."""
