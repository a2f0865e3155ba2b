"""The runtime of threads, by commands and events alone."""

from raylance.dispatch.messages import Alive, Done, Fetch, Fetched, Forget, Gather, Load, Loaded, Place, Wake
from raylance.orders.shuffles import Sequential
from raylance.planning.planned_rows import PlannedRows
from raylance.runtime.threads import ThreadRuntime
from raylance.settings import Options
from tests.helpers.in_memory import InMemory, table_of
from tests.helpers.orders import resolve
from tests.helpers.plans import make_plan
from tests.helpers.reading import Spec


def test_what_was_fetched_and_is_forgotten_is_kept_nowhere() -> None:
    """A pass that ends takes no more events, and the item would lie among them until the next pass, if there is one."""
    plan = make_plan(resolve(Sequential(), 8), 4, 1, "drop")
    runtime = ThreadRuntime(Spec(InMemory(table_of([1] * 8))), Options())  # type: ignore[arg-type]
    runtime.begin(PlannedRows(plan), "plan")
    item = next(iter(plan.items(0, 0, 0, 4)))
    load = Load(0, 0, 7, 0, item.chunk, 0, 8, 1 << 20)
    commands = Place(0, "reader"), load, Gather(1, 0, item, 7, False, 1 << 20)
    for command, event in zip(commands, (Alive, Loaded, Done), strict=True):
        runtime.do(command)
        assert isinstance(runtime.next_event(30.0), event)
    runtime.do(Fetch(2, 1, None))
    runtime.do(Fetch(3, 1, None))
    runtime.do(Forget((1, 2)))
    assert isinstance(runtime.next_event(30.0), Wake)
    fetched = runtime.next_event(30.0)
    assert isinstance(fetched, Fetched)
    assert fetched.plain["_rowoffset"].to_pylist() == [0, 2, 4, 6]
    runtime.close()
