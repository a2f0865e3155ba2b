"""Mutated pictures, and a process that decodes them as raylance does.

`python -m tests.helpers.mutated seed first count` prints the number of each picture before it decodes it, so that the
last one is known if the process ends; and at its end a line of JSON: how many were good and bad, why, and its resident
bytes on the way.
"""

import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib.util
import json
import struct
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import psutil
import pyarrow as pa

from raylance import Image, RandomResizedCrop
from raylance.decode.decoding import Decoding
from raylance.decode.open_decoding import OpenDecoding
from raylance.images import DeviceImage, ImageCrop
from tests.helpers.images import KINDS, TO_PILLOW, encode, picture, with_size
from tests.helpers.scripts import run_script

LONGEST_S = 60.0  # of one picture: it takes milliseconds, on a loaded machine too
MAX_PIXELS = 1 << 20
LOOKS = 8  # at the resident memory

Mutation = Callable[[np.random.Generator, bytes, str], bytes]


@functools.cache
def sources() -> list[tuple[str, bytes]]:
    """Good pictures and their formats."""
    photo = picture(61, 47)
    grey = np.asarray(photo.convert("L"))
    modes = {mode: photo.convert(mode) for mode in ("RGB", "L", "P", "1", "RGBA", "CMYK")}
    deep = {"I;16": PIL.Image.fromarray(grey.astype(np.uint16) * 257), "F": PIL.Image.fromarray(grey.astype("float32"))}
    frames: dict[str, Any] = {"save_all": True, "append_images": [photo.rotate(90), photo.rotate(180)]}
    made = [("JPEG", make(photo)) for make in (KINDS | TO_PILLOW).values()]
    made += [("PNG", encode(image, "PNG")) for image in (*list(modes.values())[:5], deep["I;16"])]
    made += [("PNG", encode(photo, "PNG", **frames)), ("PNG", encode(photo, "PNG", orientation=6))]
    made += [("WEBP", encode(photo, "WEBP", **how)) for how in ({}, {"lossless": True}, frames, {"quality": 5})]
    made += [("WEBP", encode(modes["RGBA"], "WEBP")), ("WEBP", encode(photo, "WEBP", orientation=5))]
    made += [("GIF", encode(modes[mode], "GIF")) for mode in ("L", "P", "1")] + [
        ("GIF", encode(photo, "GIF", **frames))
    ]
    made += [("BMP", encode(modes[mode], "BMP")) for mode in ("RGB", "L", "P", "1", "RGBA")]
    made += [("TIFF", encode(image, "TIFF")) for image in (modes | deep).values()]
    made += [
        ("TIFF", encode(photo, "TIFF", compression=how)) for how in ("tiff_lzw", "jpeg", "tiff_deflate", "packbits")
    ]
    made += [("TIFF", encode(modes["1"], "TIFF", compression="group4")), ("TIFF", encode(photo, "TIFF", orientation=8))]
    return made


def _flip(rng: np.random.Generator, data: bytes, kind: str) -> bytes:
    found = np.frombuffer(data, np.uint8).copy()
    high = len(found) if rng.random() < 0.5 else min(len(found), 200)  # headers come first
    found[rng.integers(0, high, rng.integers(1, 16))] ^= (1 << rng.integers(0, 8, 1)).astype(np.uint8)
    return found.tobytes()


def _truncate(rng: np.random.Generator, data: bytes, kind: str) -> bytes:
    return data[: rng.integers(0, len(data))]


def _splice(rng: np.random.Generator, data: bytes, kind: str) -> bytes:
    """The begin of one picture, then the end of another, mostly of the same format."""
    others = [other for of, other in sources() if of == kind or rng.random() < 0.1]
    other = others[rng.integers(len(others))]
    at = int(rng.integers(0, min(len(data), 400)))
    return data[:at] + other[min(at, len(other)) if rng.random() < 0.7 else int(rng.integers(0, len(other))) :]


def _resize(rng: np.random.Generator, data: bytes, kind: str) -> bytes:
    sides = [0, 1, 2, 61, 255, 1000, 4097, 16_383, 65_535, 2**31 - 1, int(rng.integers(0, 2**16))]
    most = 2**31 - 1 if kind in ("PNG", "BMP", "TIFF") else 65_535
    width, height = (min(most, sides[rng.integers(len(sides))]) for _ in range(2))
    try:
        return with_size(data, kind, width, height)
    except (StopIteration, struct.error):  # the header was damaged before
        return data


def _replace(rng: np.random.Generator, data: bytes, kind: str) -> bytes:
    """Other bytes in the place of some, or between them."""
    at, size = int(rng.integers(0, len(data))), int(rng.integers(1, 40))
    extreme = [b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80\0\0\0", b"\xff\xd8\xff\xd9"]
    new = extreme[rng.integers(6)] if rng.random() < 0.5 else rng.integers(0, 256, size, np.uint8).tobytes()
    return data[:at] + new + data[at + (len(new) if rng.random() < 0.7 else 0) :]


def _reorder(rng: np.random.Generator, data: bytes, kind: str) -> bytes:
    """Segments of a JPEG, chunks of a PNG or a WebP, or blocks: doubled, left out, or in another order."""
    head, parts = _parts(data, kind)
    for _ in range(int(rng.integers(1, 4))):
        one, other = (int(number) for number in rng.integers(0, len(parts), 2))
        way = rng.integers(4)
        if way == 0:
            parts[one], parts[other] = parts[other], parts[one]
        elif way == 1:
            parts.insert(other, parts[one])
        elif way == 2 and len(parts) > 1:
            del parts[one]
        else:
            parts[one:one] = [parts[one]] * int(rng.integers(2, 60))
    return head + b"".join(parts)


def _parts(data: bytes, kind: str) -> tuple[bytes, list[bytes]]:
    head, at, ends = {"JPEG": 2, "PNG": 8, "WEBP": 12}.get(kind, 0), 0, list[int]()
    at = head
    while kind in ("JPEG", "PNG", "WEBP") and at + 8 <= len(data) and len(ends) < 500:
        if kind == "JPEG":
            size = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            if data[at + 1] == 0xDA:  # pixels follow, up to the next marker
                end = at + size
                while end + 1 < len(data) and not (data[end] == 0xFF and data[end + 1] != 0):
                    end += 1
                size = end - at
        elif kind == "PNG":
            size = 12 + int.from_bytes(data[at : at + 4], "big")
        else:
            size = 8 + (int.from_bytes(data[at + 4 : at + 8], "little") + 1 & ~1)
        at += size
        ends.append(at)
    if not ends:
        ends = list(range(16, len(data), 16)) or [len(data)]
    return data[:head], [data[begin:end] for begin, end in zip([head, *ends], [*ends, len(data)], strict=True)]


_MUTATIONS: list[Mutation] = [_flip, _truncate, _splice, _resize, _replace, _reorder]


def _with_checksums(data: bytes) -> bytes:
    """A PNG whose chunks have checksums that fit, so that what they say is believed."""
    head, parts = _parts(data, "PNG")
    return head + b"".join(part[:-4] + struct.pack(">I", zlib.crc32(part[4:-4])) for part in parts if len(part) >= 12)


def mutated(seed: int, number: int) -> bytes:
    """A picture that was changed in one to three ways; the same for the same numbers."""
    rng = np.random.default_rng((seed, number))
    kind, data = sources()[rng.integers(len(sources()))]
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        if len(data) > 40:
            data = _MUTATIONS[rng.integers(len(_MUTATIONS))](rng, data, kind)
    return _with_checksums(data) if kind == "PNG" and rng.random() < 0.7 else data


def _decodings() -> dict[str, OpenDecoding]:
    crops: dict[str, Any] = {"augment": RandomResizedCrop(), "hflip": 0.5, "max_pixels": MAX_PIXELS}
    image = Image("image", size=24, **crops)
    views = Image("image", size=8, name="views", views=2, draft=True, **crops)
    leader = Image("good", size=24, **crops)
    masks = [
        Image("image", like="good", mode=mode, interpolation="nearest", size=24, name=mode, max_pixels=MAX_PIXELS)
        for mode in ("RGB", "L")
    ]
    which: dict[str, list[Any]] = {
        "colours": [image, views, ImageCrop("image").follow(image)],
        "grey": [dataclasses.replace(image, mode="L")],
        "mask": [leader, *(mask.follow(leader) for mask in masks)],
    }
    if importlib.util.find_spec("nvidia.nvimgcodec"):
        which["device"] = [DeviceImage("image", 24, **crops)]
    settings = {name: Decoding(decoders=tuple(each), seed=0, mask_bad_rows=True) for name, each in which.items()}
    return {name: OpenDecoding(decoding) for name, decoding in settings.items()}


def _check(opened: OpenDecoding, data: bytes, good: bytes, wanted: dict[str, bytes]) -> str:
    """Decodes a picture beside a good one, which gives `wanted`; returns why it is a bad row, or ""."""
    table = pa.table(
        {"image": pa.array([data, good], pa.binary()), "good": pa.array([good] * 2, pa.binary()), "_rowoffset": [0, 1]}
    )
    made, receipt = opened.apply(table, 0)
    valid = made["_valid"].to_pylist()
    assert valid[1], receipt.bad_rows
    for name in made.column_names:
        column = made[name].combine_chunks()
        if not isinstance(column, pa.FixedShapeTensorArray):  # not decoded here
            continue
        array = column.to_numpy_ndarray()
        assert array.shape == (2, *column.type.shape), array.shape
        assert wanted.setdefault(name, array[1].tobytes()) == array[1].tobytes(), f"{name} of the good row changed"
        assert valid[0] or name == "good" or not array[0].any(), f"{name} of a bad row is not blank"
    return "" if valid[0] else receipt.bad_rows[0][2].partition(":")[0]


def main(seed: int, first: int, count: int) -> None:
    """Decodes `count` pictures from number `first` on."""
    warnings.simplefilter("ignore")
    decodings, good = _decodings(), encode(picture(61, 47, 1), "JPEG")
    wanted: dict[str, dict[str, bytes]] = {name: {} for name in decodings}
    found: Counter[str] = Counter()
    resident, process, trim = [], psutil.Process(), getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    for number in range(first, first + count):
        print(number, flush=True)
        data = mutated(seed, number)
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        for name, opened in decodings.items():
            found[f"{name} {_check(opened, data, good, wanted[name])}".strip()] += 1
        faulthandler.cancel_dump_traceback_later()
        if (number - first + 1) % max(1, count // LOOKS) == 0:
            gc.collect()
            trim(0)
            resident.append(process.memory_info().rss)
    print(json.dumps({"found": dict(found), "resident": resident}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

MARGIN_BYTES = 48 << 20  # of resident memory that comes and goes; 0.5 KB kept of each of 100,000 pictures exceed it


def check(folder: Path, count: int, limit_s: float, seed: int = 0) -> None:
    script = f"from tests.helpers.mutated import main; main({seed}, 0, {count})"
    lines = run_script(script, folder, limit_s).splitlines()  # codecs say what they do not find, too
    assert [line for line in lines if line.isdigit()] == [str(number) for number in range(count)]
    (made,) = (json.loads(line) for line in lines if line.startswith("{"))
    found, resident = made["found"], made["resident"]
    print(json.dumps({"pictures": count, "found": found, "resident": resident}))
    for path in {name.split()[0] for name in found}:
        assert sum(times for name, times in found.items() if name.split()[0] == path) == count
        assert found[path] > count / 20, "some are good"
        assert found[f"{path} DecompressionBombError"] > count / 50, "some say absurd dimensions"
    assert max(resident[2:]) - resident[1] < MARGIN_BYTES, f"resident memory grew: {resident}"
