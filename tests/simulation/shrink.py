"""Makes a failing schedule shorter and tamer while it fails in the same way."""

import time
from collections.abc import Callable

from tests.simulation.play import play
from tests.simulation.schedule import Draws
from tests.simulation.watch import Broken
from tests.simulation.world import World


def fails(draws: Draws, world: type[World] = World) -> tuple[str, list[int]]:
    """What a schedule breaks ("" if nothing), and as much of it as was drawn until then."""
    try:
        play(draws, world)
    except Broken as broken:
        return broken.what, draws.taken
    except Exception as error:  # whatever the dispatcher raises
        return type(error).__name__, draws.taken
    return "", draws.taken


def shrink(taken: list[int], world: type[World] = World, most_s: float = 60.0) -> list[int]:
    """The simplest schedule that was found in the time: numbers left out, set to zero, made smaller."""
    end = time.monotonic() + most_s
    what, best = fails(Draws(given=taken), world)

    def better(other: list[int]) -> bool:
        nonlocal best
        broken, drawn = fails(Draws(given=other), world)
        while drawn and drawn[-1] == 0:
            drawn = drawn[:-1]  # zeros follow by themselves
        if broken != what or (len(drawn), sum(drawn)) >= (len(best), sum(best)):
            return False
        best = drawn
        return True

    changes: list[Callable[[list[int]], list[int]]] = [
        lambda part: [],
        lambda part: [0] * len(part),
        lambda part: [number // 2 for number in part],
    ]
    has_changed = True
    while has_changed and time.monotonic() < end:
        has_changed = False
        for change in changes:
            size = max(1, len(best) // 2)
            while size:
                at = 0
                while at < len(best) and time.monotonic() < end:
                    part = best[at : at + size]
                    if any(part) and better([*best[:at], *change(part), *best[at + size :]]):
                        has_changed = True
                    else:
                        at += size
                size //= 2
    return best
