"""Texts with a cost, and the steps of a cost on any world."""

import json
from typing import Any

import raylance

ROWS, BUDGET = 3_000, 4_000


def opened(uri: str, **arguments: Any) -> raylance.Dataset:
    return raylance.dataset(uri, **{"cost": "length", "order": "bucket", "seed": 3} | arguments)


def steps_of(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def check_steps_on_another_world(texts: str, arguments: dict[str, Any], runtime: Any) -> None:
    dataset = opened(texts, **arguments)
    size: dict[str, Any] = {"budget": raylance.Budget(BUDGET, padded="order" not in arguments)}
    whole = [sorted(step) for step in steps_of(dataset.iter_batches(**size, epoch=1))]
    assert sorted(row for step in whole for row in step) == list(range(ROWS)), "nothing is dropped"
    found: list[list[int]] = [[] for _ in whole]
    state, begin = None, 0
    for world, end in ((2, len(whole) // 3), (3, len(whole))):
        states = []
        for rank in range(world):
            with dataset.loader(rank=rank, world_size=world, runtime=runtime, record=False) as loader:
                loader.set_epoch(1)
                if state is not None:
                    loader.load_state_dict(state)
                batches = loader.batches(**size, device="cpu", pad_lists={"ids": raylance.Pad(0)})
                assert len(batches) == len(whole)
                taken = iter(batches)
                for number in range(begin, end):
                    batch = next(taken)
                    found[number] += batch["id"].tolist()
                    assert len(batch["id"])
                states.append(loader.state_dict())
        state, begin = json.loads(json.dumps(states[0])), end
        assert all(each["position"] == state["position"] for each in states)
        assert state["cost"] == "length"
        assert state["budget"] == {"cost": BUDGET, "max_rows": None, "padded": size["budget"].padded}
    assert [sorted(step) for step in found] == whole
