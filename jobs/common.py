"""What several jobs need: Ray, paths, storage options, arguments, refusals."""

import argparse
import contextlib
import functools
import hashlib
import math
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileSession
from pyarrow import fs as pafs

import jobs
import raylance
import raylance.errors

# What Lance's object store calls it, without the prefix aws_ -> what pyarrow calls it.
S3_OPTIONS = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "region": "region",
    "default_region": "region",
    "endpoint": "endpoint_override",
    "endpoint_url": "endpoint_override",
}
_AT_ONCE = 16  # files that are removed together
_MOST_BLOCKS = 10_000  # of Ray Data, each a task
HIDDEN = "…"  # in the place of a secret
SECRET = re.compile(r"secret|token|password|account_key|sas|credential", re.IGNORECASE)


class RefusedError(raylance.errors.ConfigError):
    """A request that cannot be fulfilled; the text gives cause, consequence and fix."""


@contextlib.contextmanager
def bringing(install: str, program: str) -> Iterator[None]:
    """For imports of what is not a part of raylance's own installation: says what to install if one is missing.

    Args:
        install: What brings it, as pip takes it: "raylance[examples]".
        program: The `__name__` of the module that imports. A program ends here with status 2, without a traceback.

    Raises:
        ImportError: With the same text, if the module is not the program.
    """
    try:
        yield
    except ImportError as error:
        text = f"a package is missing ({error}). Nothing was started. Install it: pip install '{install}'"
        if program != "__main__":
            raise ImportError(text) from error
        print(text, file=sys.stderr)
        raise SystemExit(2) from None


@contextlib.contextmanager
def without_fork_warning() -> Iterator[None]:
    """For `ray.init`: hides Lance's warning of forks. Ray forks only to start its daemons."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lance is not fork-safe")
        yield


def connect() -> bool:
    """Joins the Ray of RAY_ADDRESS, which `ray job submit` sets, or of this machine; returns whether it started one.

    Raises:
        RefusedError: If there is an address, and no Ray answers there, or one that asks for another token.
    """
    import ray  # slow to load, and not needed by all

    if ray.is_initialized():
        return False
    # Ray's workers look for modules where the driver was started: from elsewhere, they are sent this folder.
    folder = Path(jobs.__file__).parent
    sent = {} if Path.cwd() == folder.parent else {"runtime_env": {"py_modules": [str(folder)]}}
    with without_fork_warning():
        if os.environ.get("RAY_ADDRESS", "local") in ("local", ""):
            try:
                ray.init(labels={}, **sent)  # a Ray that is there already takes no labels, not even none
                return True
            except ValueError:
                pass
        try:
            ray.init(**sent)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            # Ray gives a refused token as the text of a cause, and a token that is nowhere as an error of its own.
            if "AuthenticationError" in f"{type(error)} {error.__cause__}":
                is_sent = os.environ.get("RAY_AUTH_MODE") == "token"
                found = "has none, or a different one" if is_sent else "sends none without RAY_AUTH_MODE=token"
                raise RefusedError(
                    f"the Ray to join asks for a token, and this process {found}. Nothing can run. Set "
                    "RAY_AUTH_MODE=token, and give that Ray's token in ~/.ray/auth_token or RAY_AUTH_TOKEN: "
                    "`ray get-auth-token` prints it on the machine where that Ray was started."
                ) from error
            raise RefusedError(
                f"no Ray answers ({error}). Nothing can run. Start it, give its RAY_ADDRESS, or set RAY_ADDRESS=local "
                "for one of this machine alone."
            ) from error
        return False


def locate(path: str) -> str:
    """Makes a local path absolute: every node writes, and a worker's current directory is not that of the driver."""
    if path[:5].lower() == "file:" and "://" not in path:
        return f"file:///{path[5:].lstrip('/')}"
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def locate_dataset(path: str) -> str:
    """The same for a Lance dataset that a job writes.

    Raises:
        RefusedError: If Lance would write to another place: it ends URIs at # and ?.
    """
    if "://" in path and {*path} & {*"#?"}:
        raise RefusedError(
            f"{path} has # or ? in it. Lance would end the name there, and write to another place. Give another name."
        )
    return locate(path)


def store_options(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The options that --storage-options give.

    Raises:
        RefusedError: For a secret that a printed command left out, and for an endpoint that Lance refuses.
    """
    options = dict(pairs)
    if hidden := [key for key, value in options.items() if value == HIDDEN]:
        raise RefusedError(
            f"--storage-options {hidden[0]}={HIDDEN}. {HIDDEN} stands for a secret that was not printed, and the store "
            "would refuse it. Put the secret there, or into the environment of all nodes."
        )
    named = {key.lower().removeprefix("aws_"): value for key, value in options.items()}
    endpoint = named.get("endpoint_url") or named.get("endpoint") or ""
    if endpoint.startswith("http://") and "allow_http" not in named and "AWS_ALLOW_HTTP" not in os.environ:
        raise RefusedError(
            f"--storage-options … {endpoint} is not https. Lance refuses to use it. Add --storage-options "
            "allow_http=true."
        )
    return options


def within(kind: Callable[[str], Any], least: float, most: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: a number in [least, most]."""

    def number(text: str) -> Any:
        if not least <= (value := kind(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text} lies outside of [{least}, {most}]")
        return value

    return number


def number_or_name(text: str) -> int | str:
    """An argparse type: a version, by its number or tag."""
    return int(text) if text.isdigit() else text


def key_value(text: str) -> tuple[str, str]:
    """An argparse type: KEY=VALUE, as --storage-options takes them."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} has no =: it would not be used; write it as KEY=VALUE")
    return key, value


def open_filesystem(uri: str, options: dict[str, str]) -> tuple[pafs.FileSystem, str]:
    """The file system of a path or URI as pyarrow has it, and the path in it; the options are Lance's.

    Raises:
        RefusedError: If it has options that pyarrow has no name for.
    """
    if "://" not in (uri := locate(uri)):
        return pafs.LocalFileSystem(), uri
    if not options:
        filesystem, path = raylance.runs.open_folder(uri)
        return filesystem, str(path)
    scheme, _, path = uri.partition("://")
    named = {key.lower().removeprefix("aws_"): value for key, value in options.items()}
    named.pop("allow_http", None)  # the endpoint shows it
    unknown = sorted(named if scheme != "s3" else named.keys() - S3_OPTIONS.keys())
    if unknown:
        raise RefusedError(
            f"--storage-options {', '.join(unknown)} cannot be used for {uri}. Outside of Lance, allow_http, "
            f"{', '.join(sorted(S3_OPTIONS))} of s3:// are understood. Set what else it takes in the environment of "
            "every node."
        )
    return pafs.S3FileSystem(**{S3_OPTIONS[key]: value for key, value in named.items()}), path


def store_words(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """The words of a command that give the same --storage-options."""
    return [word for key, value in pairs for word in ("--storage-options", f"{key}={value}")]


def show_command(words: Sequence[str]) -> str:
    """A command as a shell takes it, but for secrets among --storage-options: the reader has to put them there."""
    shown = []
    for word, before in zip(words, ["", *words], strict=False):
        flag, equals, rest = word.partition("=")
        pair = rest if flag == "--storage-options" and equals else word if before == "--storage-options" else ""
        key, _, value = pair.partition("=")
        shown.append(word.replace(value, HIDDEN) if pair and SECRET.search(key) and value else word)
    # Where single quotes would have to be quoted themselves, double ones are easier to read.
    plain = re.compile(r"""[^"$`\\!]*'[^"$`\\!]*""")
    return " ".join(f'"{word}"' if plain.fullmatch(word) else shlex.quote(word) for word in shown)


def is_blob(field: pa.Field) -> bool:
    """Whether a scan of Lance gives descriptors of a field, or of a field in it, and not its bytes."""
    is_marked = (field.metadata or {}).get(b"lance-encoding:blob") == b"true" or "lance.blob" in str(field.type)
    return is_marked or any(is_blob(field.type.field(place)) for place in range(field.type.num_fields))


def identity(dataset: lance.LanceDataset) -> str:
    """A hash of a version's data and deletion files: their names are random, so what was rewritten has another."""
    digest = hashlib.blake2b(digest_size=16)
    for fragment in dataset.get_fragments():
        meta = fragment.metadata
        deleted = meta.deletion_file and (meta.deletion_file.read_version, meta.deletion_file.id)
        overlaid = [(each.data_file.path, each.committed_version) for each in meta.overlays]  # values over the files'
        parts = (meta.id, [file.path for file in meta.files], deleted, *([overlaid] if overlaid else []))
        digest.update(repr(parts).encode())
    return digest.hexdigest()


def exists(uri: str, options: dict[str, str]) -> bool:
    """Whether a Lance dataset opens there; any other trouble with the place shows on writing."""
    try:
        lance.dataset(uri, storage_options=options)
    except (OSError, ValueError):
        return False
    return True


def taken(out: str) -> RefusedError:
    """The error of a target that is a dataset already."""
    return RefusedError(
        f"--out {out} already is a Lance dataset. New rows would take the place of its rows. Choose another --out, or "
        "give --overwrite, which adds a version."
    )


def run_tasks(task: Callable[[Any, Any], Any], items: Sequence[Any], shared: Any, **resources: float) -> Iterator[Any]:
    """Runs `task(item, shared)` for each item, as many at a time as fit; yields results as they come.

    A task is retried where its machine is lost, not where it raises: that ends all, by an error with its text.
    """
    import ray
    from ray.data import DataContext, from_items

    context = DataContext.get_current().copy()
    context.enable_progress_bars = False  # they count blocks: a job's own count rows
    packed = [{"packed": ray.cloudpickle.dumps(item)} for item in items]
    run = functools.partial(_run_task, task=task, shared=ray.put(shared))
    with DataContext.current(context):
        results = from_items(packed, override_num_blocks=min(len(packed), _MOST_BLOCKS)).map_batches(
            run, batch_format="pyarrow", batch_size=1, **resources
        )
        for batch in results.iter_batches(batch_format="pyarrow", batch_size=None):
            yield from (ray.cloudpickle.loads(result.as_py()) for result in batch["packed"])


def _run_task(batch: pa.Table, *, task: Callable[[Any, Any], Any], shared: Any) -> pa.Table:
    import ray

    [item] = batch["packed"].to_pylist()
    made = task(ray.cloudpickle.loads(item), ray.get(shared))
    return pa.table({"packed": [ray.cloudpickle.dumps(made)]})


def remove_files(uri: str, options: dict[str, str]) -> int:
    """Removes all files below a URI of whatever storage Lance knows, and local folders; returns how many there were."""
    session = LanceFileSession(uri, storage_options=options)
    files = session.list()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(session.delete_file, files))
    if "://" not in uri:
        shutil.rmtree(uri, ignore_errors=True)
    return len(files)


def reason(error: BaseException) -> str:
    """Returns one line with the cause of an error: in the text of a failed Ray task, the first error named."""
    named = re.search(r"^(?:[a-z0-9_.]+\.)?([A-Z]\w+: .+)$", str(error), re.MULTILINE)
    line = (named[1] if named else str(error) or type(error).__name__).splitlines()[0].removesuffix(".")
    # What Lance says around an error of the rows that it was given.
    return re.sub(r"LanceError\(Arrow\): C Data interface error: \w+: (.+)\. Detail: Python exception: .*", r"\1", line)
