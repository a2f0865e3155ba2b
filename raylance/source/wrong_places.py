"""Names what lies at a place at which there is no Lance dataset, and the command or the URI that serves it."""

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Iterator

_MAKE = "python jobs/create_dataset.py"
_TABLES = (".parquet", ".csv", ".tsv", ".arrow", ".feather")
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_KINDS = {
    **dict.fromkeys(_TABLES, ("tables", "a table")),
    **dict.fromkeys(_IMAGES, ("imagefolder", "images")),
    **dict.fromkeys((".tar", ".tgz"), ("webdataset", "tars")),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), (None, "JSON")),
}
_SAVED = {"dataset_dict.json", "state.json"}  # save_to_disk of the datasets library
_LOOKED_AT = 1000  # entries of a folder: it may have millions
_ONE_SLASH = re.compile(r"/(s3|gs|gcs|az|abfss|hf|http|https):/([^/].*)$")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MOST_NAMED = 5


def describe_place(uri: str) -> str:
    """Returns sentences about a place at which no Lance dataset was found; "" if there is nothing to say.

    Args:
        uri: An absolute path, or a URI. Of a URI, only the name is looked at.
    """
    if match := _ONE_SLASH.search(uri):  # it was taken for a path in the working directory
        return f" A URI has two slashes after the colon: was {match[1]}://{match[2]} meant?"
    path = uri.removeprefix("file://")
    if "://" in path or os.path.isfile(path):
        return _of_file(path)
    with contextlib.suppress(OSError):  # such as the right to look
        return _of_folder(path) if os.path.isdir(path) else _of_name(path)
    return ""


def _of_name(path: str) -> str:
    name = os.path.relpath(path)
    if not os.path.exists(path) and _HUB_NAME.fullmatch(name) and not name.endswith(".lance") and name[0] != ".":
        named = name if "/" in name else f"OWNER/{name}"
        return (
            " There is no such file or folder. If a dataset of the Hugging Face hub is meant: one in Lance's format is "
            f"opened by its URI, hf://datasets/{named}/….lance; the files of any other are downloaded, "
            f"`hf download --repo-type dataset {named} --local-dir DIR`, and converted, in a checkout of raylance: "
            f"{_MAKE} huggingface --input DIR --out data.lance."
        )
    return ""


def _of_file(path: str) -> str:
    suffix = os.path.splitext(path.lower())[1]
    command, what = _KINDS.get(suffix, (None, ""))
    return _advice(path, command, f"a {suffix} file") if what else ""


def _of_folder(path: str) -> str:
    with os.scandir(path) as found:
        entries = list(itertools.islice(found, _LOOKED_AT))
    names = {entry.name for entry in entries}
    if _is_dataset(path):
        return ""  # a damaged one
    datasets = sorted(entry.name for entry in entries if entry.is_dir() and _is_dataset(entry.path))
    if {"frames.lance", "videos.lance"} & {*datasets}:
        return f" It is a dataset in LeRobot's layout: open it by raylance.lerobot.open({path!r})."
    if datasets:
        more = f" and {len(datasets) - _MOST_NAMED} more" if len(datasets) > _MOST_NAMED else ""
        named = ", ".join(repr(os.path.join(path, name)) for name in datasets[:_MOST_NAMED])
        return f" It is a folder of Lance datasets. Name one of them: {named}{more}. raylance.mix() joins several."
    if {"meta", "data"} <= names and os.path.isfile(os.path.join(path, "meta", "info.json")):
        return _advice(path, "lerobot", "a LeRobot dataset of Parquet and MP4 files")
    if names & _SAVED:
        return _advice(path, "saved", "what save_to_disk of the datasets library wrote")
    kinds = [_KINDS.get(os.path.splitext(name.lower())[1]) for name in _names_inside(entries)]
    known = [kind for kind in kinds if kind is not None]
    if not known:
        return " The folder is empty." if not names else ""
    command, what = max(dict.fromkeys(known), key=known.count)
    return _advice(path, command, f"a folder of {'tables' if command == 'tables' else what}")


def _names_inside(entries: list[os.DirEntry[str]]) -> Iterator[str]:
    """Yields names of files in a folder, and in a few folders of it."""
    yield from (entry.name for entry in entries if entry.is_file())
    folders = [entry.path for entry in entries if entry.is_dir()][:4]
    for folder in folders:
        for _, _, names in itertools.islice(os.walk(folder), 4):
            yield from names[:_LOOKED_AT]


def _is_dataset(path: str) -> bool:
    return os.path.isdir(os.path.join(path, "_versions"))


def _advice(path: str, command: str | None, what: str) -> str:
    if command is None:
        return (
            f" It is {what}. Convert it to Parquet first, such as by "
            f"pandas.read_json({path!r}, lines=True).to_parquet('data.parquet'); then make a dataset of that: "
            f"{_MAKE} tables --input data.parquet --out data.lance."
        )
    out = os.path.splitext(path.rstrip("/"))[0] + ".lance"
    return (
        f" It is {what}. Make a Lance dataset of it, in a checkout of raylance: {_MAKE} {command} --input "
        f"{shlex.quote(path)} --out {shlex.quote(out)}."
    )
