"""Runs that change, through Ray: the batches are those of threads."""

import itertools
from collections.abc import Callable

import lance
import numpy as np
import pyarrow as pa

import raylance


def test_weights_and_rows_that_change_reach_the_actors(write_dataset: Callable[..., str], ray_session: None) -> None:
    uri = write_dataset(pa.table({"id": np.arange(300)}))
    other = raylance.dataset(write_dataset(pa.table({"id": np.arange(1000, 1200)})), order="row")

    def grown(runtime: str, number: int) -> list[list[int]]:
        given = {"order": "window", "seed": 1, "remainder": "ragged"}
        data = raylance.dataset(copies[number], version=raylance.runs.Newest(when="now"), **given)  # type: ignore[arg-type]
        with data.loader(runtime=runtime, num_decoders=0) as loader:  # type: ignore[arg-type]
            found = [list(batch["id"]) for batch in itertools.islice(loader.iter_batches(global_batch_size=32), 3)]
            state = loader.state_dict()
        ids = np.arange(300, 380)
        lance.write_dataset(pa.table({"id": ids}), copies[number], mode="append")
        lance.dataset(copies[number]).delete("id % 7 = 3")
        data = raylance.dataset(copies[number], version=raylance.runs.Newest(when="now"), **given)  # type: ignore[arg-type]
        with data.loader(runtime=runtime, num_decoders=0) as loader:  # type: ignore[arg-type]
            loader.load_state_dict(state)
            return found + [list(batch["id"]) for batch in loader.iter_batches(global_batch_size=32)]

    def mixed(runtime: str) -> list[list[int]]:
        data = raylance.mix({"a": (raylance.dataset(uri), 1), "b": (other, 1)})
        with data.loader(runtime=runtime, num_decoders=0) as loader:  # type: ignore[arg-type]
            found = []
            for number, batch in enumerate(itertools.islice(loader.iter_batches(global_batch_size=16), 12)):
                found.append(list(batch["id"]))
                if number in (3, 7):
                    loader.reweight({"a": number, "b": 1})
            return found

    copies = [write_dataset(pa.table({"id": np.arange(300)})) for _ in range(2)]
    by_ray = grown("ray", 0)
    assert by_ray == grown("threads", 1)
    first = {row for rows in by_ray[:3] for row in rows}
    assert sorted(itertools.chain(*by_ray)) == sorted(first | {row for row in range(380) if row % 7 != 3})
    assert mixed("ray") == mixed("threads")
