"""Tags that keep the versions of a run from clean-ups."""

import contextlib
import re
from collections.abc import Iterator

import lance

from raylance.api.dataset import Dataset, opened_of
from raylance.errors import ConfigError, DatasetError
from raylance.source.lance_errors import LANCE_ERRORS
from raylance.source.version import Source


@contextlib.contextmanager
def pinned(dataset: Dataset, run: str) -> Iterator[None]:
    """Keeps the versions of a dataset, or of all datasets of a mixture, from clean-ups until a run has ended well.

        with raylance.runs.pinned(data, "llm-7b"):
            trainer.fit()

    Each version gets the tag `raylance-<version>-<run>`, because clean-ups of Lance keep tagged versions. At the end,
    the tags of this run are removed, also those of its earlier starts. After an error or a kill they stay, so that the
    run can be started again with its versions, and proven.

    Args:
        dataset: What `raylance.dataset` or `raylance.mix` returned.
        run: Name of the run: letters, digits, ".", "-" and "_".

    Raises:
        ConfigError: If an argument cannot be honoured.
        DatasetError: If a tag cannot be written or removed.
    """
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"pinned({dataset!r}): give what raylance.dataset or raylance.mix returns.")
    if not (isinstance(run, str) and re.fullmatch(r"\w+([.-]?\w+)*", run, re.ASCII)):
        raise ConfigError(f"pinned(): run={run!r}; give a name of letters, digits, '.', '-' and '_'.")
    sources = opened_of(dataset).read.source.sources
    for source in sources:
        tag = f"raylance-{source.version}-{run}"
        with _changing(source, tag) as opened:
            tags = opened.tags.list()
            if tag not in tags:
                opened.tags.create(tag, (source.branch, source.version) if source.branch else source.version)
            elif (tags[tag]["branch"] or "main") != (source.branch or "main"):
                raise DatasetError(
                    f"{source.uri!r} has the tag {tag!r} for its branch {tags[tag]['branch']!r}, and the dataset is of "
                    f"{source.branch!r}. Give another name of the run."
                )
    yield
    for source in sources:
        with _changing(source, run) as opened:
            for tag in [each for each in opened.tags.list() if re.fullmatch(rf"raylance-\d+-{re.escape(run)}", each)]:
                opened.tags.delete(tag)


@contextlib.contextmanager
def _changing(source: Source, tag: str) -> Iterator[lance.LanceDataset]:
    """Opens a dataset whose tags are to change."""
    opened = source.open()
    try:
        yield opened
    except LANCE_ERRORS as error:
        raise DatasetError(
            f"the tags {tag!r} of {source.uri!r} could not be changed ({error}). Check that the credentials allow "
            "writing; without tags, a clean-up may remove the version that is trained on."
        ) from error
