"""Owns the checks of ranks in simulated time, and of the planner's memory at 10¹⁰ rows; never their speed."""

import dataclasses
import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import raylance
from raylance.orders.order import Facts, Order
from raylance.planning.plan import Plan
from tests.simulation.fleet import Fleet, Found, simulate
from tests.simulation.scale import command, studies, validating
from tests.simulation.timed import Setting

# Round figures, so that results can be calculated by hand.
RUN = Setting(
    decoders=4, batch_size=8, raw_bytes=64, decoded_bytes=1000, steps=40, rows=8 * 40, order=raylance.Sequential(),
    is_warm=True, decode_row_s=0.01,
)  # fmt: skip
VARYING = {
    "decode_row_varies": 0.5, "decode_item_varies": 0.2, "rank_varies": 0.1, "step_s": 0.02, "step_varies": 0.1,
    "read_call_s": 1e-3, "submit_s": 1e-4, "event_s": 1e-4, "fetch_call_s": 1e-3, "batch_row_s": 1e-5, "start_s": 2.0,
    "notice_s": 0.1,
}  # fmt: skip


def go(**changes: Any) -> Found:
    run = dataclasses.replace(RUN, **changes)
    an_item = 1.25 * run.batch_size * (1.5 * run.raw_bytes + run.decoded_bytes)  # is a step
    limit_bytes = int((2 * run.decoders + 1) * an_item)
    rows = run.batch_size * run.steps * run.ranks
    return simulate(dataclasses.replace(run, rows=rows, max_inflight_bytes=limit_bytes))


def without_clock(found: Found) -> Found:
    """But for what real seconds the dispatchers took."""
    return dataclasses.replace(found, decide_s=0.0)


@pytest.mark.parametrize("dies", ["", "decoder", "reader"])
@pytest.mark.parametrize(("ranks", "readers"), [(1, 1), (3, 1), (3, 2)])
def test_every_row_is_delivered_once(ranks: int, readers: int, dies: str) -> None:
    changes: dict[str, Any] = {"ranks": ranks, "readers": readers, "rows": 8 * 40 * ranks, "dies": dies} | VARYING
    run = dataclasses.replace(RUN, order=raylance.RowShuffle(), **changes)
    fleet = Fleet(run)
    assert fleet.go().rows == run.rows
    rows = [
        row
        for rank in fleet.ranks
        for item in rank.delivered
        for row in fleet.plan.select(item.epoch, fleet.plan.item_positions(item)).tolist()
    ]
    assert sorted(rows) == list(range(run.rows))
    assert all(not rank.bytes for rank in fleet.ranks), "what was delivered is counted no more"


def test_the_same_seed_gives_the_same() -> None:
    first, again, other = (without_clock(go(**VARYING, ranks=3, seed=seed, is_warm=False)) for seed in (1, 1, 2))
    assert first == again
    assert first.seconds != other.seconds


@pytest.mark.parametrize("decoders", [1, 2, 4, 8])
def test_one_rank_has_the_throughput_of_its_slowest_part(decoders: int) -> None:
    """Decoders that have always something to do, a reader that is slower than they are, and a model that is."""
    steps = 40 * decoders
    decoding = go(decoders=decoders, steps=steps)
    assert decoding.rows / decoding.seconds == pytest.approx(decoders / 0.01, rel=0.03)
    reading = go(read_row_s=0.02, decoders=decoders, steps=steps)
    assert reading.rows / reading.seconds == pytest.approx(1 / 0.02, rel=0.03)
    training = go(step_s=0.2, decoders=decoders, steps=steps)
    assert training.rows_per_s == pytest.approx(8 / 0.2, rel=1e-6)
    assert training.stall == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("readers", [2, 4])
def test_readers_read_side_by_side_where_the_storage_is_waited_for(readers: int) -> None:
    """Chunks of eight steps; each reader gets as much of the storage as one does."""
    slow = {"reader_bytes_s": 64 * 100.0}
    order, window = raylance.WindowShuffle(shard_rows=64, window_shards=1, lanes=1), 2 * 64 * 64
    options: dict[str, Any] = {"order": order, "max_window_bytes": window, "steps": 640, "decode_row_s": 0.0001}
    alone, several = (go(**slow, readers=number, **options) for number in (1, readers))
    assert alone.rows / alone.seconds == pytest.approx(100, rel=0.05)
    assert several.rows / several.seconds == pytest.approx(100 * readers, rel=0.07)
    assert several.held_bytes <= window
    fast = [go(readers=number, **options).seconds for number in (1, readers)]
    assert fast[1] == pytest.approx(fast[0], rel=0.01), "nor do they cost anything where nobody waits for them"


@pytest.mark.parametrize(("step_s", "wanted"), [(0.2, {1}), (0.05, {2}), (0.03, {3, 4}), (0.021, {4})])
def test_readers_come_until_the_trainer_does_not_wait_and_stay(step_s: float, wanted: set[int]) -> None:
    """One reader gets 100 rows a second of the storage, and a step takes eight."""
    order, window = raylance.WindowShuffle(shard_rows=64, window_shards=1, lanes=1), 2 * 64 * 64
    run = dataclasses.replace(
        RUN, order=order, max_window_bytes=window, max_inflight_bytes=50_000, most_readers=4, steps=1000, rows=8_000,
        decode_row_s=0.0001, step_s=step_s, reader_bytes_s=64 * 100.0,
    )  # fmt: skip
    fleet = Fleet(run)
    (rank,), wishes = fleet.ranks, [1]
    (scaler,) = rank.scalers
    rank.fleet.stepped, stepped = lambda *about: (wishes.append(scaler.wanted), stepped(*about)), rank.fleet.stepped
    found = fleet.go()
    assert wishes == sorted(wishes), "no reader is dismissed"
    assert scaler.wanted in wanted
    assert wishes[500] == scaler.wanted, "the number is found soon"
    assert len(rank.reading) == scaler.wanted
    assert found.stall < 0.05


def test_more_decoders_are_never_slower() -> None:
    calls = {"decode_call_s": 1e-3, "submit_s": 1e-4, "event_s": 1e-4}
    took = [go(**calls, decoders=decoders).seconds for decoders in (1, 2, 4, 8, 16)]
    assert all(more <= few for few, more in itertools.pairwise(took))
    assert took[0] > 3.5 * took[2], "and of use"


def test_the_slowest_rank_holds_the_others() -> None:
    few, many = (go(**VARYING | {"step_s": 0.022}, ranks=ranks) for ranks in (1, 32))
    assert many.stall > few.stall
    assert many.rows_per_s < 32 * few.rows_per_s


def test_what_is_shared_bounds_all_ranks_together() -> None:
    per_s = 64 * 8 / 0.01
    free = go(ranks=4)
    # Windows of eight steps: the first one is read beside its items, and that takes its share of the storage.
    bound = go(ranks=4, steps=400, storage_bytes_s=per_s, max_window_bytes=2 * 64 * 64)
    asked = go(ranks=4, storage_requests_s=10.0, order=raylance.RowShuffle())
    assert free.rows / free.seconds > 4 * 0.9 * 4 / 0.01
    assert bound.rows / bound.seconds == pytest.approx(per_s / 64, rel=0.1)
    assert asked.requests_per_row > 0.5
    assert asked.rows / asked.seconds == pytest.approx(10.0 / asked.requests_per_row, rel=0.1)
    away = go(decode_row_s=0.0, ranks=4, decoders_elsewhere=4, network_bytes_s=1064 * 100.0)
    assert away.rows / away.seconds == pytest.approx(100.0, rel=0.1)


@pytest.mark.parametrize("kind", ["reader", "decoder"])
def test_a_death_takes_as_long_as_a_new_helper(kind: str) -> None:
    """Without a shard actor nothing is read; if one of two decoders dies, the other one works."""
    usual, longer = (go(start_s=5.0, notice_s=1.0, decoders=2, dies=dies, steps=160) for dies in ("", kind))
    delay_s = longer.seconds - usual.seconds
    if kind == "reader":
        assert 6.0 - 0.5 < delay_s < 6.0 + 0.1, "what was read already is decoded and trained on meanwhile"
    else:
        # Six seconds with half of the decoders, of which the first has what the dead one had to be done again.
        assert 3.0 * 0.9 < delay_s < 3.0 * 1.2
        assert longer.longest_step_s < usual.longest_step_s + 2.0


def test_actors_start_one_after_the_other_where_all_ask_at_once() -> None:
    alone, crowd = (go(start_s=2.0, actors_s=10.0, ranks=ranks, is_warm=False) for ranks in (1, 16))
    assert alone.first_batch_s > 2.0
    assert crowd.first_batch_s == pytest.approx(16 * 5 / 10.0 + 2.0, abs=0.3)


ORDERS: tuple[Order, ...] = (
    raylance.WindowShuffle(),
    raylance.WindowShuffle(shard_rows=4096, window_shards=8, lanes=32),
    raylance.ShardShuffle(shard_rows=4096),
    raylance.RowShuffle(),
    raylance.Sequential(),
)


@pytest.mark.parametrize("ranks", [1, 64, 1024])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_a_step_of_ten_billion_rows_fits_in_fifty_megabytes(order: Order, ranks: int) -> None:
    """Any step of an epoch that was not planned before, of the first, the middle and the last rank."""
    size = 256 * ranks
    resolved = order.resolve(Facts(rows=10**10, seed=3, row_bytes=42_000.0, global_batch_size=size))
    chunk = resolved.read_positions or size * 4
    plan = Plan(order=resolved, global_batch_size=size, dp_size=ranks, remainder="drop", chunk_positions=chunk)
    last = plan.steps() - 1
    tracemalloc.start()
    try:
        for position in (size * step for step in (0, 1, last // 3, last // 2, last)):
            for rank in {0, ranks // 2, ranks - 1}:
                plan.select(2, plan.positions(position, *plan.rank_slice(position, rank)))
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_the_command_simulates_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.json"
    arguments = ["--ranks", "1,2", "--studies", "barrier,auto", "--set", "steps=4", "--processes", "1"]
    assert command.main([*arguments, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["found"]
    assert found["barrier"]["2"]["rows"] == 2 * 4 * 256
    assert "order='window' as it resolves" in capsys.readouterr().out


def test_the_picture_is_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "o.png"
    arguments = ["--ranks", "1,2", "--set", "steps=4", "--processes", "1", "--plot", str(path)]
    assert command.main(arguments) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "speed=3"], "there is no 'speed'"),
        (["--set", "steps"], "could not convert"),
        (["--studies", "none"], "there is no none"),
        (["--ranks", "0"], "must be at least 1"),
        (["--ranks", "x"], "invalid literal"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_run_beside_the_simulation(tmp_path: Path, ray_session: None) -> None:
    """Both end, and all rows come; a decoder dies in both. The command says how near they are."""
    case = validating.Case(ranks=1, decoders=2, row_s=0.01, steps=12, dies=True)
    _, seconds = validating.measure(case, validating.write(tmp_path, case.rows))
    _, simulated_s = validating.predict(case, studies.BASE)
    least_s = case.rows * case.row_s / case.decoders
    assert seconds > least_s
    assert simulated_s > least_s
