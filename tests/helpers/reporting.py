"""Reports of a state that takes a while to collect."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import raylance


class Collected(Mapping[str, int]):
    """A state that takes a while to collect, and sees how much of that counts as saving, and how much as training."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.grown = loader, []

    def __getitem__(self, name: str) -> int:
        before = self._loader.stats()
        time.sleep(0.05)
        after = self._loader.stats()
        saved, trained = (after["save_s"] - before["save_s"], after["user_s"] - before["user_s"])
        self.grown.append((saved, trained - saved))
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["step"])

    def __len__(self) -> int:
        return 1


def report_slowly(loader: Any, name: str) -> list[tuple[float, float]]:
    raylance.report({"step": 5}, loader, collected := Collected(loader), checkpoint_dir_name=name)
    return collected.grown
