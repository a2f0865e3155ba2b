"""Owns the advice."""


def advise(wish, cpus):
    return ""
