"""Sources of one image a file: directories that name classes, and the demo's digits."""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import PIL.Image
import pyarrow as pa

from jobs.common import RefusedError
from jobs.create_dataset.labels import read_classes
from jobs.create_dataset.sources import (
    PLAIN_SPLITS,
    Left,
    Piece,
    Source,
    chunked,
    cut,
    explain_splits,
    in_blocks,
    list_files,
    split_of,
)

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
AT_ONCE = 256  # files that are read together,
READERS = 8  # by so many threads: an object store takes long for each


class Digits(Source):
    """The 1,797 handwritten digits that scikit-learn carries, as 8x8 greyscale PNG."""

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise RefusedError(
                f"scikit-learn carries the digits, and cannot be imported ({error}). Nothing was written. Install it: "
                "pip install 'raylance[jobs]'"
            ) from error
        digits, encoded = load_digits(), []
        for pixels in (digits.images * (255 / 16)).round().astype("uint8"):  # (8, 8), from 0..16
            PIL.Image.fromarray(pixels).save(buffer := io.BytesIO(), format="PNG")
            encoded.append(buffer.getvalue())
        self.classes = [str(name) for name in digits.target_names]
        self.rows = pa.table({"image": pa.array(encoded, pa.binary()), "label": pa.array(digits.target, pa.int64())})
        self.facts = "digits"

    def pieces(self, rows: int) -> list[Piece]:
        """Spans of the one table."""
        return cut([(None, self.rows.num_rows)], rows, "digits")

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Slices of it."""
        for _, low, high in piece.parts:
            yield self.rows.slice(low, high - low)


class ImageFolder(Source):
    """<class>/**/<image> or <split>/<class>/**/<image>; a class is a directory that holds images."""

    def __init__(self, location: str, classes_file: str | None, options: dict[str, str], file_column: str = "") -> None:
        """Lists the directory; `file_column`, unless it is empty, is to hold the path of each image."""
        if file_column in ("image", "label", "split"):
            raise RefusedError(
                f"--file-column {file_column} is the name of another column. One would be lost. Give another name."
            )
        self.file_column = file_column
        self.listing = list_files(location, IMAGES, options)
        self.left_out, self.facts = self.listing.left_out, self.listing.facts
        files = self.listing.files
        parts = [file.split("/") for file in files]
        self.has_splits = all(split_of(names[0]) for names in parts)
        if self.has_splits:
            self.remarks = explain_splits(location, {names[0] for names in parts})
        self.depth = 1 if self.has_splits else 0  # of the class among the parts
        if astray := [file for file, names in zip(files, parts, strict=True) if len(names) < self.depth + 2]:
            raise RefusedError(
                f"{len(astray)} of {len(files)} images lie in no class directory, such as {astray[0]}. They "
                f"would have no label. Arrange --input {location} as <class>/<image> or <split>/<class>/<image>."
            )
        # A class may be called train (CIFAR-100 has it); with directories in it, it is a split beside classes.
        if not self.has_splits and (
            mixed := {names[0] for names in parts if len(names) > 2 and names[0].lower() in PLAIN_SPLITS}
        ):
            raise RefusedError(
                f"--input {location} has {', '.join(sorted(mixed))} beside directories that are no splits. "
                "Splits would be taken for classes. Make all of them splits, or none."
            )
        self.classes = read_classes(classes_file, {names[self.depth] for names in parts})

    def __getstate__(self) -> dict[str, object]:
        # Each piece names its files; all of them with every task would be too many.
        return self.__dict__ | {"listing": self.listing._replace(files=[], left_out=[], facts=[]), "left_out": ()}

    def pieces(self, rows: int) -> list[Piece]:
        """Files in the order of their names."""
        return [
            Piece(name=f"files from {files[0]} on", parts=files, rows=len(files))
            for files in chunked(self.listing.files, rows)
        ]

    def where(self, piece: Piece, row: int) -> str:
        """The file."""
        return self.listing.path(piece.parts[row])

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Bytes as they are."""
        labels = {name: label for label, name in enumerate(self.classes or ())}

        def load(file: str) -> bytes:
            with self.listing.filesystem.open_input_stream(self.listing.path(file)) as opened:
                return bytes(opened.read())

        with ThreadPoolExecutor(READERS) as threads:
            for files in chunked(piece.parts, AT_ONCE):
                names = [file.split("/") for file in files]
                columns = {
                    "image": pa.array(list(threads.map(load, files)), pa.binary()),
                    "label": pa.array([labels[parts[self.depth]] for parts in names], pa.int64()),
                }
                if self.file_column:
                    columns[self.file_column] = pa.array(files, pa.string())
                if self.has_splits:
                    columns["split"] = pa.array([split_of(parts[0]) for parts in names], pa.string())
                yield from in_blocks(pa.table(columns))
