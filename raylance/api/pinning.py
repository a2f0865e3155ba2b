"""Tags that keep the versions of a run from clean-ups."""

import contextlib
import re
from collections.abc import Iterator

import lance

from raylance.api.dataset import Dataset, opened_of
from raylance.errors import ConfigError, DatasetError
from raylance.source.lance_errors import LANCE_ERRORS
from raylance.source.version import Source


def pin(dataset: Dataset, run: str) -> None:
    """Keeps the versions that a run reads from clean-ups, until `unpin`: those of the dataset, or of all datasets of a
    mixture, and of their videos.

        raylance.runs.pin(data, "llm-7b")
        trainer.fit()
        raylance.runs.unpin(data, "llm-7b")      # not after an error: the run can be started again, and proven

    Each version gets the tag `raylance--<run>--<version>`, because clean-ups of Lance keep tagged versions. A version
    that has the tag keeps it. A run that opens newer versions in its course pins each.

    Args:
        dataset: What `raylance.dataset` or `raylance.mix` returned.
        run: Name of the run: letters, digits, and single ".", "-" and "_" between them.

    Raises:
        ConfigError: If an argument cannot be honoured.
        DatasetError: If a tag cannot be written.
    """
    for source in _sources("pin()", dataset, run):
        branch = "" if source.branch is None else re.sub(r"\W+", "-", source.branch) + "--"
        tag, version = f"{_prefix(run)}{branch}{source.version}", source.version
        with _changing(source) as opened:
            try:
                opened.tags.create(tag, (source.branch, version) if source.branch else version)
            except LANCE_ERRORS:  # as when another process was faster
                if tag not in opened.tags.list():
                    raise


def unpin(dataset: Dataset, run: str) -> None:
    """Removes the tags of `pin`: those of all versions that the run has pinned in these datasets.

    Args:
        dataset: What `raylance.dataset` or `raylance.mix` returned, of any version.
        run: Name of the run.

    Raises:
        ConfigError: If an argument cannot be honoured.
        DatasetError: If a tag cannot be removed.
    """
    for source in _sources("unpin()", dataset, run):
        with _changing(source) as opened:
            for tag in [each for each in opened.tags.list() if each.startswith(_prefix(run))]:
                opened.tags.delete(tag)


def _prefix(run: str) -> str:
    return f"raylance--{run}--"


def _sources(call: str, dataset: Dataset, run: str) -> list[Source]:
    """Returns the versions of all datasets, each once."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"{call}: {dataset!r} is not a dataset; give what raylance.dataset or raylance.mix returns.")
    if not (isinstance(run, str) and re.fullmatch(r"\w+([.-]\w+)*", run, re.ASCII)) or run.endswith(".lock"):
        raise ConfigError(
            f"{call}: run={run!r}; give a name of letters and digits, with single '.', '-' or '_' between them."
        )
    found = opened_of(dataset).read.source.sources
    return list({(each.uri, each.branch, each.version): each for each in found}.values())


@contextlib.contextmanager
def _changing(source: Source) -> Iterator[lance.LanceDataset]:
    """Opens a dataset whose tags are to change."""
    opened = source.open()
    try:
        yield opened
    except LANCE_ERRORS as error:
        raise DatasetError(
            f"the tags of {source.uri!r} could not be changed ({error}). Check that the credentials allow writing; "
            "without tags, a clean-up may remove the version that is trained on."
        ) from error
