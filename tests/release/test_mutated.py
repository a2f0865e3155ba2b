"""Thousands of mutated pictures."""

from pathlib import Path

import pytest

from tests.helpers.mutated import check


@pytest.mark.timeout(3600)
def test_many_mutated_pictures_cost_no_process_no_time_and_no_memory(tmp_path: Path) -> None:
    """Five to ten minutes."""
    check(tmp_path, 100_000, limit_s=3500)
