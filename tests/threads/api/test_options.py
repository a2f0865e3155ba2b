"""Each call that takes options takes all of them, shows them, and hands them on."""

import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.api.loader import consumer_of
from raylance.errors import ConfigError
from raylance.torch_data import IterableDataset

PUBLIC = {field.name: field.default for field in dataclasses.fields(raylance.Options) if field.name != "auto_decoders"}
OTHERS: dict[str, Any] = {
    "num_decoders": 0,
    "num_readers": 2,
    "decoder_cpus": 0.5,
    "decode_threads": 3,
    "reader_bytes": 1 << 20,
    "inflight_bytes": 2 << 20,
    "placement_timeout_s": 1.5,
    "read_timeout_s": 2.5,
    "work_timeout_s": 3.5,
    "record": False,
    "name": "other",
    "runtime": "threads",
    "traces": True,
}


@pytest.fixture(scope="module")
def dataset(write_dataset: Callable[..., str]) -> raylance.Dataset:
    return raylance.dataset(write_dataset(pa.table({"id": np.arange(100)})), transform=dict)


def test_each_option_reaches_the_loaders(dataset: raylance.Dataset) -> None:
    assert OTHERS.keys() == PUBLIC.keys(), "a new option: give it a value here"
    wanted = raylance.Options(**OTHERS)
    assert consumer_of(dataset.loader(**OTHERS)).options == wanted
    config = pickle.loads(pickle.dumps(raylance.DataConfig(["train"], **OTHERS)))
    for nodes in (None, ["one", "other"]):
        ranks = config.configure({"train": dataset}, 2, None, nodes)
        assert [consumer_of(rank["train"]).options for rank in ranks] == [wanted] * 2


def test_numbers_of_bytes_may_be_written_as_floats() -> None:
    options = raylance.Options(reader_bytes=1e9, inflight_bytes=np.float64(2e6))  # type: ignore[arg-type]
    assert (repr(options.reader_bytes), repr(options.inflight_bytes)) == ("1000000000", "2000000")
    assert raylance.Options(read_timeout_s=float("inf")).read_timeout_s == float("inf"), "it is tried for ever"


@pytest.mark.parametrize("call", [raylance.DataConfig.__init__, raylance.Dataset.loader])
def test_the_type_of_options_names_each_of_them(call: Any) -> None:
    (named,) = get_args(get_type_hints(call)["options"])  # of `Unpack`, by which type checkers and editors know them
    types = get_type_hints(raylance.Options)
    assert get_type_hints(named) == {name: types[name] for name in PUBLIC}


def test_options_of_0_12_work_with_a_warning_at_the_line_that_has_them(dataset: raylance.Dataset) -> None:
    older = {"max_window_bytes": 1 << 20, "max_inflight_bytes": 2 << 20}
    wanted = raylance.Options(reader_bytes=1 << 20, inflight_bytes=2 << 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        assert raylance.Options(**older) == wanted  # type: ignore[arg-type]
        assert consumer_of(dataset.loader(**older)).options == wanted
        raylance.DataConfig(**older)
        IterableDataset(dataset, batch_size=8, max_window_bytes=1 << 20)
    caught = [warning for warning in caught if warning.category is FutureWarning]
    assert [warning.filename for warning in caught] == [__file__] * 7
    assert {str(warning.message).split()[1] for warning in caught} == {f"{name}=" for name in older}


def test_an_option_that_there_is_not_is_refused(dataset: raylance.Dataset) -> None:
    for call in (raylance.DataConfig, dataset.loader):
        with pytest.raises(ConfigError, match=r"no argument work_timeout=: did you mean work_timeout_s=\?"):
            call(work_timeout=3)
        with pytest.raises(ConfigError, match="auto_decoders="):
            call(auto_decoders=3)
    with pytest.raises(ConfigError, match="work_timeout_s='long'"):
        raylance.DataConfig(work_timeout_s="long")
    with pytest.raises(ConfigError, match="decode_threads=0: must be an integer of at least 1"):
        raylance.DataConfig(decode_threads=0)


def test_a_figure_of_0_12_has_another_name_now(dataset: raylance.Dataset) -> None:
    with dataset.loader(runtime="threads") as loader:
        next(iter(loader.iter_batches(batch_size=8)))
        figures = loader.stats()
    assert figures["reader_bytes"] > 0
    with pytest.warns(FutureWarning, match="reader_bytes"):
        assert figures["window_bytes"] == figures["reader_bytes"]
    with pytest.raises(KeyError, match="window"):
        figures["window"]
