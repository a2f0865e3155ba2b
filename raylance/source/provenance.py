"""The record of the dataset from which another one was made, and the check for changes."""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import lance
import pyarrow as pa

from raylance.errors import DatasetError
from raylance.secrets import public_uri
from raylance.source.limits import within
from raylance.source.storage_options import StorageOptions
from raylance.source.version import Source, warn_once

Stale = Literal["warn", "refuse", "ignore"]
STALE: tuple[Stale, ...] = ("warn", "refuse", "ignore")
KEY = b"raylance:provenance"

logger = logging.getLogger(__name__)

_FORMAT = 1
_REACH_S = 10.0  # Lance itself tries for minutes if an object store does not answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Records how `jobs/materialize` made a dataset from another one, the source. This record is stored as JSON under
    `raylance:provenance` in the schema metadata of the dataset that was made.

    Attributes:
        uri: URI of the source, as given to `raylance.dataset`.
        version: Version of the source.
        branch: Branch in which the version is counted; None for the branch that `uri` opens.
        identity: Hash of that version's files, as in checkpoints.
        filter: SQL expression that selected the rows, or None.
        columns: Columns that were copied.
        rows: Number of selected rows.
        fingerprint: Hash of the selected rows' offsets in the source, as in checkpoints.
        seed: Seed of the order in which the rows were written.
        order: "shuffled", or "grouped" by `group_by` and shuffled within each group.
        group_by: Column of the groups, or None.
        transform: Changes that were made to values, JSON-able; None for no change.
        raylance: Version of raylance that made the dataset.
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
        """Reads the provenance from a schema; None if the schema has none.

        Raises:
            DatasetError: If the provenance is damaged, or was written by a newer raylance.
        """
        text = (schema.metadata or {}).get(KEY)
        if text is None:
            return None
        try:
            fields = json.loads(text)
            if fields.pop("format") > _FORMAT:
                raise ValueError("it was written by a newer raylance")
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DatasetError(
                f"the schema metadata {KEY.decode()!r} cannot be read ({error}), so the source of the rows is "
                'unknown. Upgrade raylance, or open the dataset with stale="ignore".'
            ) from error

    def add_to(self, schema: pa.Schema) -> pa.Schema:
        """Returns the schema with this provenance in its metadata."""
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, ensure_ascii=False)
        return schema.with_metadata({**(schema.metadata or {}), KEY: text.encode()})


def check_fresh(opened: lance.LanceDataset, stale: Stale, storage_options: StorageOptions | None) -> None:
    """Warns about a dataset whose source has changed since it was made; with "refuse", raises DatasetError; with
    "ignore", does nothing. The source's newest version is opened once, with the storage options of the dataset. If that
    fails, it is logged, and no error.
    """
    if stale == "ignore":
        return
    try:
        made_from = Provenance.read(opened.schema)
    except DatasetError as error:
        if stale == "refuse":
            raise
        warn_once(str(error))
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
        # With "refuse", the user must know that nothing was compared.
        logger.log(
            logging.WARNING if stale == "refuse" else logging.DEBUG,
            "%r was not compared with its source: %r cannot be opened (%s)",
            opened.uri,
            public_uri(str(made_from.uri)),
            public_uri(str(newest)),
        )
    elif newest.identity != made_from.identity:
        now = f"version {newest.version}"
        if newest.version == made_from.version:
            now += ", written again"
        text = (
            f"{opened.uri!r} was made from version {made_from.version} of {public_uri(made_from.uri)!r}, which is "
            f"at {now}: it lacks the changes since then. Make it again with jobs/materialize, or pass "
            'stale="ignore".'
        )
        if stale == "refuse":
            raise DatasetError(f"{text} Nothing was started.")
        warn_once(text)


def _newest(source: Source) -> Source | Exception:
    """Returns the newest version of a source, or the error if the source cannot be opened within ten seconds."""
    try:
        return within(_REACH_S, source.newest)
    except Exception as error:  # the error concerns only the source, which the user did not open
        return error
