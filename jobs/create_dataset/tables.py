"""Sources that are tables already: Parquet, CSV, Arrow, Feather, Lance."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import lance
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

import raylance
from jobs.common import RefusedError, identity, is_blob, locate, reason
from jobs.create_dataset.fitting import as_read, check_schema, is_number, kind_of, to_numbers
from jobs.create_dataset.shaping import is_image, plain, take_bytes
from jobs.create_dataset.sources import (
    ALIGNED,
    BLOCK_BYTES,
    Files,
    Left,
    Piece,
    Source,
    cut,
    from_file,
    in_blocks,
    read_stream,
    replaced,
    with_split,
)

PARQUET, TEXT, ARROW = (".parquet", ".pq"), (".csv", ".tsv", ".csv.gz", ".tsv.gz"), (".arrow", ".feather", ".ipc")
_MAGIC = b"ARROW1"  # of an Arrow file, which lists its batches; a stream begins otherwise


class Tables(Files):
    """Files of one schema.

    A frame of pandas goes through a file: `frame.to_parquet` or `frame.to_feather`. The index that pandas stores beside
    the columns is left out, and what the `datasets` library stores beside the bytes of images.
    """

    def __init__(
        self,
        location: str,
        columns: Sequence[str] | None,
        image: str,
        options: dict[str, str],
        text_columns: Sequence[str] = (),
        endings: tuple[str, ...] = (*PARQUET, *TEXT, *ARROW),
    ) -> None:
        """Reads the columns of each file, and its number of rows where it holds one; some columns stay text."""
        super().__init__(location, endings, options)
        self.text_columns = frozenset(text_columns)
        self.columns, self.image = (None if columns is None else list(columns)), image
        self.kinds: dict[str, pa.DataType] = {}  # of the columns of text files: what the first rows of them show
        self.parts: list[tuple[tuple[str, int], int | None]] = []
        index, schemas = dict[str, None](), dict[str, pa.Schema]()  # the latter of files that have rows
        try:
            for file in self.listing.files:
                schema, counts = self._look(file)
                self._note(schema, file, index)
                self.parts += [((file, part), rows) for part, rows in enumerate(counts)]
                if any(rows != 0 for rows in counts):
                    schemas[file] = schema
        except (OSError, pa.ArrowInvalid) as error:
            raise RefusedError(
                f"{file} in --input {location} can't be read ({reason(error)}). Its rows would be missing. Write or "
                "download it again, or move it away."
            ) from error
        if missing := sorted(self.text_columns - self.kinds.keys()):
            raise RefusedError(
                f"--text-columns {', '.join(missing)} is no column of text files, which have "
                f"{', '.join(self.kinds) or 'none'}. Nothing would be kept as text. Name columns of CSV or TSV files."
            )
        self.index = [name for name in index if self.columns is None or name not in self.columns]
        kept = {file: self._keep(schema.empty_table(), file).schema for file, schema in schemas.items()}
        for file, schema in kept.items():
            check_schema(schema, plain(next(iter(kept.values()))), file)
        why = "is the index of a pandas frame; name it by --columns to keep it"
        self.left_out = [*self.listing.left_out, *(Left(f"column {name}", why) for name in self.index)]

    def _look(self, file: str) -> tuple[pa.Schema, list[int | None]]:
        """Columns of a file, and the rows of each part of it."""
        if file.lower().endswith(TEXT):
            return self._look_into_text(file)
        with self.listing.open(file) as opened:
            if file.lower().endswith(PARQUET):
                found = pq.ParquetFile(opened)
                groups = range(found.num_row_groups)
                return found.schema_arrow, [found.metadata.row_group(group).num_rows for group in groups]
            if not is_file(opened):
                with pa.ipc.open_stream(opened) as stream:
                    return stream.schema, [None]
            with pa.ipc.open_file(opened) as read:
                return read.schema, [read.get_batch(batch).num_rows for batch in range(read.num_record_batches)]

    def _look_into_text(self, file: str) -> tuple[pa.Schema, list[int | None]]:
        """Columns of the header; their types come from the first rows of all text files, and hold for the rest."""
        names = self._header(file)
        if not self.kinds and len(set(names)) == len(names):  # `_note` refuses others
            first = next((table for table in self._read_text(file) if table.num_rows), None)
            if first is None:
                return pa.schema([(name, pa.null()) for name in names]), [0]
            if binary := [field.name for field in first.schema if pa.types.is_binary(field.type)]:
                raise RefusedError(_no_utf8(file, f"column {', '.join(binary)}"))
            self._decide_kinds(file, first.schema)
        return pa.schema([(name, self.kinds.get(name, pa.null())) for name in names]), [None]

    def _decide_kinds(self, file: str, found: pa.Schema) -> None:
        """Takes the types that the first rows show, but for those that would change a value."""
        asked = {field.name: pa.string() if field.name in self.text_columns else field.type for field in found}
        doubtful = {name: pa.string() for name, kind in asked.items() if is_number(kind) or pa.types.is_null(kind)}
        texts = next(table for table in self._batches(file, asked | doubtful) if table.num_rows)
        for name, kind in asked.items():
            asked[name], why = kind_of(texts[name], kind) if name in doubtful else (kind, "")
            if why and (self.columns is None or name in self.columns):
                self.remarks.append(f"{name} is {asked[name]}: as {kind}, {why}")
        self.kinds = asked

    def _header(self, file: str) -> list[str]:
        separator = separator_of(file)
        with self.listing.filesystem.open_input_stream(self.listing.path(file), compression="detect") as opened:
            try:
                lines = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
                names = next((row for row in csv.reader(lines, delimiter=separator) if row), [])
            except UnicodeDecodeError as error:
                raise RefusedError(_no_utf8(file, reason(error))) from error
            except csv.Error as error:
                raise RefusedError(
                    f"{file} has no header that can be read ({error}). Its columns would have no names. Write it again."
                ) from error
        if len(names) == 1 and (other := [found for found in ";\t," if found in names[0] and found != separator]):
            raise RefusedError(
                f"{file} has one column, {names[0]!r}. Its values seem to be separated by {other[0]!r}, and would stay "
                "together. Write a .csv with commas, and a .tsv with tabs."
            )
        return names

    def _note(self, schema: pa.Schema, file: str, index: dict[str, None]) -> None:
        """Refuses columns that --columns or a dataset can't have; notes those that hold the index of a frame."""
        if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
            raise RefusedError(
                f"{file} has several columns {', '.join(twice)}. A dataset has one of a name, the others would be "
                "lost. Write it again with other names."
            )
        check_asked(self.columns, schema, file)
        pandas = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
        index |= dict.fromkeys(name for name in pandas.get("index_columns", ()) if name in schema.names)

    def pieces(self, rows: int) -> list[Piece]:
        """Spans of row groups and batches; a whole file where its number of rows is unknown."""
        return cut(self.parts, rows, "part")

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Columns as they are."""
        for (file, part), low, high in piece.parts:
            for table in self._read(file, part, low, high):
                yield from in_blocks(with_split(self._keep(table, file), self.splits.get(file)))

    def _keep(self, table: pa.Table, file: str) -> pa.Table:
        """The columns to keep; of images as the `datasets` library stores them, the bytes."""
        names = [name for name in self.columns or table.column_names if name not in self.index]
        kept = from_file(table.select(names), file)
        return take_bytes(kept, self.image) if self.image in names and is_image(kept[self.image].type) else kept

    def _read(self, file: str, part: int, low: int, high: int | None) -> Iterator[pa.Table]:
        try:
            if file.lower().endswith(TEXT):
                yield from self._read_text(file)
                return
            with self.listing.open(file) as opened:
                if file.lower().endswith(PARQUET):
                    columns = None if self.columns is None else [*self.columns]
                    yield pq.ParquetFile(opened).read_row_group(part, columns=columns).slice(low, high and high - low)
                elif is_file(opened):
                    batch = pa.ipc.open_file(opened, options=ALIGNED).get_batch(part)
                    yield pa.Table.from_batches([batch]).slice(low, high and high - low)
                else:
                    yield from read_stream(opened, file)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{file} is damaged: {error}") from None

    def _read_text(self, file: str) -> Iterator[pa.Table]:
        """The rows of a text file, of the types of the first rows."""
        for table in self._batches(file, as_read(self.kinds)):
            for name in table.column_names:
                kind = self.kinds.get(name, pa.null())
                if is_number(kind) and (self.columns is None or name in self.columns):
                    try:
                        table = replaced(table, name, to_numbers(table[name], kind))
                    except ValueError as error:
                        raise self._misfit(file, name, error) from None
            yield table

    def _batches(self, file: str, kinds: dict[str, pa.DataType]) -> Iterator[pa.Table]:
        with self.listing.filesystem.open_input_stream(self.listing.path(file), compression="detect") as opened:
            try:
                reader = pyarrow.csv.open_csv(
                    opened,
                    read_options=pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES // 8),
                    parse_options=pyarrow.csv.ParseOptions(delimiter=separator_of(file), newlines_in_values=True),
                    convert_options=pyarrow.csv.ConvertOptions(column_types=kinds),
                )
                yield from (pa.Table.from_batches([batch]) for batch in reader)
            except pa.ArrowInvalid as error:
                if place := re.search(r"column #(\d+)", str(error)):
                    raise self._misfit(file, self._header(file)[int(place[1])], error) from None
                raise

    def _misfit(self, file: str, name: str, error: Exception) -> ValueError:
        kind = f"{self.kinds[name]} in the first rows of all" if name in self.kinds else "else in its first rows"
        return ValueError(
            f"column {name} is {kind}, and not in {file} ({reason(error)}). Its values would be changed or lost. Give "
            f"--text-columns {name} to keep them as they are written, write all alike, or as Parquet, where columns "
            "have types."
        )


def check_asked(columns: Sequence[str] | None, schema: pa.Schema, where: str) -> None:
    """Refuses --columns that a file or a dataset does not have."""
    if missing := [name for name in columns or () if name not in schema.names]:
        raise RefusedError(
            f"{where} lacks the column {', '.join(missing)}, it has {', '.join(schema.names)}. --columns would not be "
            "what it says. Name columns that are in all that is read."
        )


def separator_of(file: str) -> str:
    """What stands between the values of a text file."""
    return "\t" if ".tsv" in file.lower() else ","


def _no_utf8(file: str, what: str) -> str:
    return (
        f"{file} is not encoded as UTF-8 ({what}). Its texts would be bytes, or wrong. Write it again, such as by "
        f"`iconv -f latin1 -t utf-8`, where its encoding is Latin-1."
    )


def is_file(opened: pa.NativeFile) -> bool:
    """Whether it is an Arrow file (Feather version 2 is one), and no stream."""
    magic = bytes(opened.read(len(_MAGIC)))
    opened.seek(0)
    return magic == _MAGIC


class LanceTable(Source):
    """Another Lance dataset, or a table of LanceDB, which is one: `database/table.lance`."""

    def __init__(
        self, location: str, columns: Sequence[str] | None, filter: str | None, options: dict[str, str]
    ) -> None:
        """Opens it at its newest version."""
        self.uri, self.filter, self.options = locate(location), filter, options
        try:
            opened = lance.dataset(self.uri, storage_options=options)
            self.rows = opened.count_rows()
        except (OSError, ValueError) as error:
            raise RefusedError(
                f"--input {location} can't be read as a Lance dataset ({reason(error)}). There is nothing to copy. "
                "Give the URI of one; a table of LanceDB lies at <database>/<table>.lance."
            ) from error
        check_asked(columns, opened.schema, f"--input {location}")
        self.columns = list(columns or opened.schema.names)
        if blobs := [name for name in self.columns if is_blob(opened.schema.field(name))]:
            raise RefusedError(
                f"column {', '.join(blobs)} of --input {location} is blob-encoded. A scan gives descriptors and not "
                "its bytes, so a copy would hold no data. Leave it out by --columns, or write it as a plain binary "
                "column first."
            )
        try:
            if filter is not None:  # by raylance, which refuses a filter on which Lance would end the process
                selected = raylance.dataset(
                    self.uri, version=opened.version, columns=self.columns, filter=filter, storage_options=options
                )
                self.rows = len(selected)
        except raylance.RaylanceError as error:
            raise RefusedError(
                f"--filter can't be used on --input {location} ({reason(error)}). No row would be kept. Write it in "
                f"SQL, of the columns {', '.join(opened.schema.names)}."
            ) from error
        self.version, self.identity = opened.version, identity(opened)
        self.facts = [self.uri, self.version, self.identity, filter]
        names = (opened.schema.metadata or {}).get(b"classes")
        self.classes = json.loads(names) if names else None
        of = (opened.schema.metadata or {}).get(b"classes_of", b"label").decode()
        self.classes_of = of if of in opened.schema.names else None

    def pieces(self, rows: int) -> list[Piece]:
        """Spans of its rows."""
        filtered = "" if self.filter is None else f" where {self.filter}"
        return cut([((f"{self.uri}{filtered}", None), self.rows)], rows, "rows")

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Columns as they are."""
        opened: Any = lance.dataset(self.uri, version=self.version, storage_options=self.options)
        if identity(opened) != self.identity:
            raise ValueError(f"{self.uri} was rewritten while it was read")
        for _, low, high in piece.parts:
            scanner = opened.scanner(
                columns=self.columns,
                filter=self.filter,
                offset=low,
                limit=high - low,
                batch_size=1024,
                scan_in_order=True,
            )
            for batch in scanner.to_batches():
                yield from in_blocks(pa.Table.from_batches([batch]).replace_schema_metadata(None))
