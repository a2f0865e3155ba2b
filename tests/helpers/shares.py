"""Ranks that take part in some steps, with shares that change."""

import random
from typing import Any

import raylance

BATCH, ROWS, EPOCHS = 24, 500, 3


def take_part(
    loaders: list[raylance.RankLoader], made: list[Any], present: list[int], step: int, *, moves: bool
) -> list[int]:
    rows: list[int] = []
    for share, number in enumerate(present):
        loader = loaders[number]
        if moves:
            loader.reshard(share, len(present), elastic=True)
        if loader.global_step != step:
            loader.seek(step, global_batch_size=BATCH)
        try:
            batch = next(made[number])
        except StopIteration:  # at an epoch's turn
            batch = next(made[number])
        assert (batch["x"][:, 0] == 4 * batch["id"]).all()
        rows += batch["id"].tolist()
        assert loader.global_step == step + 1
    return rows


def play(data: raylance.Dataset, seed: int, remainder: Any, **options: Any) -> None:
    """Ranks come, go, and repeat steps, at random."""
    draw, wanted = random.Random(seed), undisturbed(data, remainder)
    loaders = [data.loader(rank=rank, world_size=4, num_decoders=0, **options) for rank in range(4)]
    bound = {"global_batch_size": BATCH, "drop_last": remainder == "drop", "prefetch_batches": draw.choice([0, 1, 3])}
    made: list[Any] = [loader.iter_batches(**bound) for loader in loaders]
    present, moves, step = [0, 1, 2, 3], False, 0
    while step < len(wanted):
        if draw.random() < 0.15:
            present, moves = draw.sample(range(4), draw.randint(1, 4)), True
        assert take_part(loaders, made, present, step, moves=moves) == wanted[step], step
        moves = False
        if draw.random() < 0.15:
            for number in present:
                loaders[number].repeat()
                state = loaders[number].state_dict()
                assert state["global_step"] == step, "what was taken back is not saved"
            moves = draw.random() < 0.5
            if moves:
                draw.shuffle(present)
            continue
        step += 1
    for number in present:
        state = loaders[number].state_dict()
        assert (state["epoch"], state["position"], state["global_step"]) == (EPOCHS, 0, len(wanted))
    for loader in loaders:
        loader.close()


def undisturbed(data: raylance.Dataset, remainder: Any) -> list[list[int]]:
    drop_last = {"drop": True, "ragged": False}[remainder]
    return [
        batch["id"].tolist()
        for epoch in range(EPOCHS)
        for batch in data.iter_batches(global_batch_size=BATCH, epoch=epoch, drop_last=drop_last)
    ]
