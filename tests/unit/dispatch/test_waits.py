"""Owns when a wait of the consumer counts: from its event on, until it takes a batch."""

from raylance.dispatch.messages import Awaited, Taken
from raylance.observe.observations import Cause, Status
from tests.helpers.dispatch import Driver, make_pool


def cause_after(driver: Driver, event: Awaited | Taken) -> Cause | None:
    (status,) = [output for output in driver.dispatcher.handle(event, 1.0) if isinstance(output, Status)]
    return status.cause


def test_a_wait_ends_when_a_batch_is_taken() -> None:
    driver = Driver(make_pool())
    assert cause_after(driver, Awaited()) is not None
    assert cause_after(driver, Taken(0)) is None
    assert cause_after(driver, Awaited()) is not None
