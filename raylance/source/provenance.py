"""Owns what a materialised dataset says of its source, and whether that source has moved on; never reads a row."""

import dataclasses
import functools
import json
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import lance
import pyarrow as pa

from raylance.errors import DatasetError
from raylance.source.version import Source

Stale = Literal["warn", "refuse", "ignore"]
STALE: tuple[Stale, ...] = ("warn", "refuse", "ignore")
KEY = b"raylance:provenance"

logger = logging.getLogger(__name__)

_FORMAT = 1
_REACH_S = 10.0  # object stores that do not answer are asked again for minutes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the rows of a materialised dataset come from: JSON under `raylance:provenance` in its schema metadata.

    Attributes:
        uri: The source, as `raylance.dataset` took it.
        version: Its version.
        branch: Branch that the version is counted in, or None for what `uri` opens.
        identity: Hash of that version's files, as checkpoints have it.
        filter: SQL expression that selected the rows, or None.
        columns: Columns that were taken over.
        rows: Rows that were selected.
        fingerprint: Hash of their row offsets, as checkpoints have it.
        seed: Seed of the order.
        order: "shuffled", or "grouped" by `group_by` and shuffled inside of each group.
        group_by: Column of the groups, or None.
        transform: What was done to values, JSON-able, or None for nothing.
        raylance: Version of raylance that made it.
    """

    uri: str
    version: int
    branch: str | None
    identity: str
    filter: str | None
    columns: Sequence[str]
    rows: int
    fingerprint: str
    seed: int
    order: str
    group_by: str | None
    transform: Mapping[str, Any] | None
    raylance: str

    @classmethod
    def read(cls, schema: pa.Schema) -> Self | None:
        """What a schema says; None where it says nothing.

        Raises:
            DatasetError: If what it says cannot be read.
        """
        text = (schema.metadata or {}).get(KEY)
        if text is None:
            return None
        try:
            said = json.loads(text)
            if said.pop("format") > _FORMAT:
                raise ValueError("it was written by a newer raylance")
            return cls(**said)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DatasetError(
                f"the schema metadata {KEY.decode()!r} cannot be read ({error}), so nobody knows what the rows were "
                'made from. Upgrade raylance, or open the dataset with stale="ignore".'
            ) from error

    def add_to(self, schema: pa.Schema) -> pa.Schema:
        """The schema with this in its metadata."""
        said = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, ensure_ascii=False)
        return schema.with_metadata({**(schema.metadata or {}), KEY: said.encode()})


def check_fresh(opened: lance.LanceDataset, stale: Stale, storage_options: Mapping[str, str] | None) -> None:
    """Tells, or refuses, where a dataset was made from a source that has other files now.

    The source's newest version is opened once, with the storage options of the dataset itself. One that cannot be
    reached stops nobody.

    Raises:
        DatasetError: With "refuse", if the source has moved on, or nobody can read what it was.
    """
    if stale == "ignore":
        return
    try:
        made_from = Provenance.read(opened.schema)
    except DatasetError as error:
        if stale == "refuse":
            raise
        _warn_once(str(error))
        return
    if made_from is None:
        return
    source = Source(
        uri=made_from.uri,
        version=made_from.version,
        branch=made_from.branch,
        identity=made_from.identity,
        storage_options=storage_options,
    )
    newest = _newest(source)
    if isinstance(newest, Exception):
        # Who asks for a refusal must know that nothing was compared.
        logger.log(
            logging.WARNING if stale == "refuse" else logging.DEBUG,
            "whether %s is as new as its source cannot be told: %s cannot be opened (%s)",
            opened.uri,
            made_from.uri,
            newest,
        )
    elif newest.identity != made_from.identity:
        now = f"version {newest.version}"
        if newest.version == made_from.version:
            now += ", written anew"
        text = (
            f"{opened.uri!r} was made from version {made_from.version} of {made_from.uri!r}, which is at {now}: rows "
            "that were added, changed or deleted there since are not so here. Make it again by jobs/materialize, or "
            'say stale="ignore".'
        )
        if stale == "refuse":
            raise DatasetError(f"{text} Nothing was started.")
        _warn_once(text)


def _newest(source: Source) -> Source | Exception:
    """The newest version, or why it cannot be opened in a few seconds."""
    answers: queue.SimpleQueue[Source | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(source.newest())
        except Exception as error:  # whatever it is, it is about another dataset than the one that was asked for
            answers.put(error)

    threading.Thread(target=ask, daemon=True, name="raylance-provenance").start()
    try:
        return answers.get(timeout=_REACH_S)
    except queue.Empty:
        return TimeoutError(f"no answer in {_REACH_S:.0f} s")


@functools.cache
def _warn_once(text: str) -> None:
    """Warns once a process: train and validation rows are often parts of one dataset."""
    logger.warning("%s", text)
