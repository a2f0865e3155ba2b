"""More than two gibibytes of binary values."""

import pyarrow as pa

from raylance.work.row_memory import RowMemory


def test_more_than_two_gibibytes_of_binary_stay_in_pieces() -> None:
    table = pa.table({"data": pa.array([bytes(1 << 28)] * 3, pa.binary())})
    memory = RowMemory(1 << 20, 9)
    for _ in range(3):
        memory.append(table)
    found = memory.table()["data"]
    assert found.num_chunks > 1
    assert [value.as_buffer().size for value in found] == [1 << 28] * 9
