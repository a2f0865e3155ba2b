"""What strangers may have written (states, checkpoints, records, metadata of datasets) runs no code, takes no memory
without a limit, reads nothing elsewhere and writes no HTML; no secret is shown.
"""

import html.parser
import io
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
import torch

import raylance
from raylance.audit import read_setting
from raylance.errors import ConfigError, DatasetError
from raylance.integrations.checkpoint_files import load_state_file
from raylance.observe.record import COLUMNS
from raylance.planning import state as states
from raylance.planning.state import read_state
from raylance.reports import reading
from raylance.reports.reading import read_run
from raylance.secrets import public_uri
from raylance.source.data_files import DataFiles
from raylance.source.lance_errors import readable_text
from tests.helpers.faulty_store import bucket_of

ROWS = 100
SCRIPT = "<script>alert(1)</script>"
DEEP = "[" * 200_000


class Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that a trap makes; a trap that is unpickled does make it."""
    path = tmp_path / "mark"
    pickle.loads(pickle.dumps(Trap(path)))
    path.unlink()
    return path


# ---- nothing is unpickled


@pytest.mark.parametrize("form", ["torch", "torch of old", "pickle"])
def test_a_state_file_runs_no_code(tmp_path: Path, mark: Path, form: str) -> None:
    path = tmp_path / "state.pt"
    if form == "pickle":
        path.write_bytes(pickle.dumps({"model": Trap(mark)}))
    else:
        torch.save({"model": Trap(mark)}, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(raylance.StateError, match=r"state\.pt of the checkpoint is damaged, or no state"):
        load_state_file(path)
    assert not mark.exists()


READ = """
import sys, ray.data, raylance
try:
    print(eval(sys.argv[1], {"raylance": raylance}))
except Exception as error:
    print(type(error).__name__, error)
"""


def read_beside_ray_data(call: str) -> str:
    """What a call prints in a process with Ray Data, which registers types of Arrow that unpickle their values."""
    command = [sys.executable, "-c", READ, call]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def pickled(mark: Path, rows: int, name: str = "x", *, is_nested: bool = False) -> pa.Table:
    """A column of traps in the type of Ray Data, which has no place for a type in a list but its metadata."""
    metadata = {"ARROW:extension:name": "ray.data.arrow_pickled_object", "ARROW:extension:metadata": ""}
    field, trap = pa.field(name, pa.large_binary(), metadata=metadata), pickle.dumps(Trap(mark))
    values: list[Any] = [trap] * rows
    if is_nested:
        field, values = pa.field(name, pa.list_(field)), [[trap]] * rows
    return pa.table([pa.array(values, field.type)], schema=pa.schema([field]))


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_dataset_of_pickled_objects_is_refused(tmp_path: Path, mark: Path, is_nested: bool) -> None:
    """Also where Ray Data is not imported: rows travel to processes that have it."""
    uri = str(tmp_path / "x.lance")
    lance.write_dataset(pickled(mark, 3, is_nested=is_nested), uri)
    with pytest.raises(DatasetError, match="'x'"):
        raylance.dataset(uri)
    if not is_nested:
        shown = read_beside_ray_data(f"raylance.dataset({uri!r}, order='sequential').head(1)")
        assert "DatasetError" in shown
    assert not mark.exists()


def test_records_and_parts_of_pickled_objects_are_left_alone(
    tmp_path: Path, mark: Path, write_record: Callable[..., Path]
) -> None:
    """Of a record, the column is one of figures; of a part, it is that of row offsets."""
    path = write_record()
    table = pyarrow.feather.read_table(path, memory_map=False)
    traps = pickled(mark, 1, "rows")
    at = table.column_names.index("rows")
    pyarrow.feather.write_feather(table.set_column(at, traps.schema.field(0), traps["rows"]), str(path))
    (tmp_path / "parts").mkdir()
    with pa.ipc.new_file(str(tmp_path / "parts" / "a.arrow"), pickled(mark, 1, "_rowoffset").schema) as file:
        file.write_table(pickled(mark, 1, "_rowoffset"))
    report, parts = str(tmp_path / "run"), str(tmp_path / "parts")
    records = f"__import__('raylance.reports.reading').reports.reading.read_run({report!r}).records"
    shown = read_beside_ray_data(f"({records}, raylance.writing.read_values({parts!r}, 1))")
    assert "DatasetError" in shown
    assert not mark.exists()


@pytest.mark.parametrize("text", ["(" * 100_000, "-" * 1_000_000 + "1", f"FractionSplit({'[' * 5000}{']' * 5000})"])
def test_a_setting_that_is_nested_too_deep_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_setting(text)


# ---- sizes have limits


@pytest.mark.parametrize("how", ["deep", "large", "endless"])
def test_a_state_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(states, "_MOST_BYTES", 1 << 20)
    path = tmp_path / "raylance_state.json"
    if how == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_text(DEEP if how == "deep" else f'{{"format": 5}}{" " * (1 << 20)}')
    with pytest.raises(raylance.StateError, match="truncated or damaged"):
        read_state(tmp_path)


@pytest.mark.parametrize("how", ["compressed", "overlapping"])
def test_a_state_file_needs_no_more_memory_than_it_has_bytes(tmp_path: Path, how: str) -> None:
    """A file of some kB may stand for gigabytes."""
    saved, bomb = io.BytesIO(), tmp_path / "state.pt"
    torch.save({"model": torch.zeros(1 << 20)}, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(bomb, "w") as new:
        for info in old.infolist():
            kind = zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED
            new.writestr(info.filename, old.read(info), kind)
        if how == "overlapping":
            new.filelist += new.filelist
    if how == "compressed":
        assert bomb.stat().st_size < 1 << 16
        assert torch.load(bomb, weights_only=True)["model"].nbytes == 4 << 20, "torch alone takes it"
    with pytest.raises(raylance.StateError, match="damaged"):
        load_state_file(bomb)


@pytest.fixture
def write_record(tmp_path: Path) -> Callable[..., Path]:
    """Writes a record with this number of samples, as others may; returns its path."""

    def write(name: str = "good", samples: int = 1, facts: dict[str, Any] | None = None, text: str = "") -> Path:
        path = tmp_path / "run" / "raylance" / f"{name}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = {"format": 1, "dataset": "train", "rank": 0, "started": 1.7e9, "run": "r"}
        table = pa.table(
            {column: np.zeros(samples) for column in COLUMNS},
            metadata={"raylance": text or json.dumps(known | (facts or {}))},
        )
        pyarrow.feather.write_feather(table, str(path), compression="zstd")
        return path

    return write


@pytest.mark.parametrize("how", ["deep", "bomb", "large"])
def test_a_record_that_is_too_large_is_left_out(
    tmp_path: Path, write_record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    write_record()
    bad = write_record("bad", samples=1 << 22 if how == "bomb" else 1, text=DEEP if how == "deep" else "")
    if how == "bomb":
        assert bad.stat().st_size < 1 << 20
    if how == "large":
        bad = write_record("bad", facts={"more": "x" * 10_000})
        assert len(read_run(tmp_path / "run").records) == 2
        monkeypatch.setattr(reading, "_MOST_BYTES", bad.stat().st_size - 1)
    before = pa.total_allocated_bytes()
    assert [record.name for record in read_run(tmp_path / "run").records] == ["good"]
    assert pa.total_allocated_bytes() - before < 1 << 26


def test_a_record_of_odd_facts_hides_no_other(tmp_path: Path, write_record: Callable[..., Path]) -> None:
    write_record()
    odd = {"rank": ["x", 1e999, None], "started": [[1]], "begun_s": [[1]], "dataset": [""], "peers": [""]}
    for name, values in odd.items():
        for value in values:
            write_record("bad", facts={name: value})
            assert [record.name for record in read_run(tmp_path / "run").records] == ["good"], (name, value)


# ---- paths stay inside


@pytest.mark.parametrize("is_absolute", [False, True])
def test_no_data_file_of_another_dataset_is_read(tmp_path: Path, is_absolute: bool) -> None:
    """A manifest names data files. Lance makes names of them that stay in the dataset; so no such file is there."""
    private, public, hostile = (tmp_path / name for name in ("private.lance", "public.lance", "hostile.lance"))
    lance.write_dataset(pa.table({"id": np.arange(ROWS)}), str(private))
    lance.write_dataset(pa.table({"id": np.zeros(ROWS, np.int64)}), str(public))
    shutil.copytree(public, hostile)
    (file,) = (private / "data").iterdir()
    opened = lance.dataset(str(hostile))
    fragment = opened.get_fragments()[0].metadata.to_json()
    fragment["files"][0] |= {
        "path": str(file) if is_absolute else f"../../private.lance/data/{file.name}",
        "file_size_bytes": file.stat().st_size,
    }
    made = lance.FragmentMetadata.from_json(json.dumps(fragment))
    lance.LanceDataset.commit(str(hostile), lance.LanceOperation.Overwrite(opened.schema, [made]))

    read = DataFiles(lance.dataset(str(hostile)), ["id"]).read(0, 10)
    assert read is None, "the rows of another dataset were read"
    with pytest.raises(DatasetError, match="cannot be read"):
        raylance.dataset(str(hostile)).head()


# ---- HTML


class Tags(html.parser.HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_a_handle_shows_names_as_text(write_dataset: Callable[..., str]) -> None:
    metadata = {"classes": json.dumps([SCRIPT] * 3), "classes_of": SCRIPT}
    rows = pa.table({SCRIPT: np.arange(ROWS) % 3, "t": [SCRIPT] * ROWS}).replace_schema_metadata(metadata)
    data = raylance.dataset(write_dataset(rows), filter=f"t = '{SCRIPT}'")
    for shown in (data, data.show(3), data.show(data[:4]), data.plan(10)):
        assert Tags(shown._repr_html_()).tags <= {"div", "table", "tr", "th", "td", "pre"}


ROWS_HTML = f"""<table style="x"><tr><th>id</th></tr><tr><td>{SCRIPT}<img src="https://x.org/y.png" onerror="alert(2)">
<img src="data:image/png;base64,AA=="><a href="javascript:alert(3)">7</a><iframe srcdoc="x"></iframe></td></tr></table>
<meta http-equiv="refresh" content="0;url=https://x.org"><style>* {{display: none}}</style><svg onload="alert(4)"></svg>
"""


def test_a_report_shows_what_others_wrote_as_text(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    """Names of a record, its errors, and the HTML of the first rows beside it."""
    folder, uri = str(tmp_path / "run"), write_dataset(pa.table({"id": np.arange(ROWS)}))
    with raylance.dataset(uri).loader(runtime="threads", record=folder, name="train") as loader:
        next(iter(loader.iter_batches(global_batch_size=10)))
    (path,) = (tmp_path / "run" / "raylance").glob("*.arrow")
    table = pyarrow.feather.read_table(path, memory_map=False)
    facts = json.loads(table.schema.metadata[b"raylance"])
    facts |= {"run": SCRIPT, "dataset": SCRIPT, "host": SCRIPT, "raylance": SCRIPT, "remainder": "drop"}
    facts |= {
        "events": [[1.7e9, "error", f"{SCRIPT}\x1b[2J"], [1.7e9, "fault", SCRIPT]],
        "bad_rows": [[1, "id", SCRIPT]],
    }
    table = table.replace_schema_metadata({"raylance": json.dumps(facts)})
    pyarrow.feather.write_feather(table, str(path), compression="zstd")
    plain = Tags(Path(raylance.report_run(folder)).read_text())
    path.with_suffix(".html").write_text(ROWS_HTML)
    page = Path(raylance.report_run(folder)).read_text()
    found = Tags(page)
    assert "<script" not in page
    assert "x.org" not in page
    assert "data:image/png;base64,AA==" in page
    assert found.tags <= plain.tags
    assert found.attributes <= plain.attributes
    assert "Content-Security-Policy" in page
    assert "\x1b" not in page + str(read_run(folder).records)


# ---- secrets


SECRET = "pl4nted"


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://user:{SECRET}@bucket/x.lance",
        f"s3://user:a/{SECRET}@bucket/x.lance",
        f"s3://bucket/x.lance?X-Amz-Signature={SECRET}&a=b",
        f"az://bucket/x.lance?sv=2020&sig={SECRET}",
        f"s3://bucket/x.lance?Access_Key={SECRET}",
    ],
)
def test_a_secret_in_a_uri_is_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"storage_options") as caught:
        raylance.dataset(uri)
    assert SECRET not in str(caught.value) + public_uri(uri)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aws_endpoint": f"http://me:{SECRET}@127.0.0.1:1"}, "'aws_endpoint' is 'http://…@127.0.0.1:1', with"),
        (f"token={SECRET}", "storage_options is a str"),
        ([("token", SECRET)], "storage_options is a list"),
        ({"token": SECRET.encode()}, "the value of 'token' is a bytes"),
    ],
)
def test_options_that_would_show_a_secret_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        raylance.dataset("s3://bucket/x.lance", storage_options=options)
    assert SECRET not in str(caught.value)


def test_the_errors_of_a_storage_show_no_password(caplog: pytest.LogCaptureFixture) -> None:
    """An endpoint of the environment may have one."""
    text = f"Generic S3 error: Error performing GET http://u:{SECRET}@h:1/b?list-type=2&prefix=x in 1ms"
    shown = readable_text(OSError(text))
    assert shown == "Generic S3 error: Error performing GET http://…@h:1/b?list-type=2&prefix=x in 1ms"
    assert SECRET not in readable_text(OSError(f"GET https://h/b?sv=1&sig={SECRET}&x=1: 403"))


@pytest.mark.parametrize(
    "call", [raylance.report_run, raylance.explain_run, raylance.prove_run, raylance.runs.newest_checkpoint]
)
def test_a_folder_is_shown_without_its_password(call: Callable[[str], Any], s3_port: int) -> None:
    bucket_of(s3_port, "hostile")
    at = f"127.0.0.1%3A{s3_port}"
    with pytest.raises((ConfigError, raylance.StateError)) as caught:
        call(f"s3://me:{SECRET}@hostile/run?scheme=http&region=us-east-1&endpoint_override={at}")
    assert "hostile/run" in str(caught.value)
    assert SECRET not in str(caught.value)
