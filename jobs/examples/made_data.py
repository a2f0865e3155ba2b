"""Makes small datasets for the recipes, where no public one would be small enough: scenes, sounds, documents, episodes.

`scenes` have a picture of one coloured shape, its mask, its box, a caption in tokens and a label; `sounds` are tones of
different lengths, with the label of their pitch; `documents` are lists of tokens of different lengths; `pages` are such
lists with 0 to 6 images of any size among them; `episodes` are frames of an arm that pushes a disc to the middle, as
two cameras see it, with its state and action. All are the same each time.

    python -m jobs.examples.made_data scenes scenes.lance
"""

import argparse
import io
import sys
import wave

import lance
import numpy as np
import PIL.Image
import PIL.ImageDraw
import pyarrow as pa

import raylance

SHAPES, COLOURS = ("ellipse", "rectangle"), ("red", "green", "blue", "white")
FRAMES = 20  # in each episode
WORDS = 16  # of the captions: 0 ends one, and 1 to 15 are words
IMAGE = WORDS  # in pages, the token that stands for a part of an image
PATCHES = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}  # of a `raylance.Patches` of pages


def scenes(rows: int) -> pa.Table:
    """Pictures of 48 x 64 pixels: image, mask, boxes (left, top, right, bottom), caption, label and split."""
    rng = np.random.default_rng(0)
    columns: dict[str, list[object]] = {name: [] for name in ("image", "mask", "boxes", "caption", "label")}
    for _ in range(rows):
        shape, colour = int(rng.integers(len(SHAPES))), int(rng.integers(len(COLOURS)))
        left, top = int(rng.integers(0, 40)), int(rng.integers(0, 24))
        box = [left, top, left + int(rng.integers(12, 24)), top + int(rng.integers(12, 24))]
        noise = PIL.Image.fromarray(rng.integers(0, 80, (48, 64, 3), dtype=np.uint8))
        mask = PIL.Image.new("L", noise.size)
        for picture, fill in ((noise, COLOURS[colour]), (mask, 1)):
            draw = getattr(PIL.ImageDraw.Draw(picture), SHAPES[shape])
            draw([box[0], box[1], box[2] - 1, box[3] - 1], fill=fill)
        columns["image"].append(_encode(noise, "JPEG"))
        columns["mask"].append(_encode(mask, "PNG"))
        columns["boxes"].append([box])
        columns["caption"].append([1 + shape, 3 + colour, *rng.integers(7, WORDS, rng.integers(0, 5)).tolist(), 0])
        columns["label"].append(shape * len(COLOURS) + colour)
    types = {"image": pa.binary(), "mask": pa.binary(), "boxes": pa.list_(pa.list_(pa.float32(), 4))}
    types |= {"caption": pa.list_(pa.int32()), "label": pa.int64()}
    return _split({name: pa.array(values, types[name]) for name, values in columns.items()}, rows)


def sounds(rows: int) -> pa.Table:
    """WAV files of 16 bits and 8 kHz, of 0.05 to 0.2 s: sound, seconds, label and split."""
    rng = np.random.default_rng(0)
    encoded, seconds, labels = [], [], rng.integers(0, 4, rows)
    for label in labels:
        frames = np.sin(np.arange(rng.integers(400, 1600)) * 0.1 * (1 + label)) * 20000 + rng.normal(0, 500)
        with wave.open(buffer := io.BytesIO(), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(frames.astype("<i2").tobytes())
        encoded.append(buffer.getvalue())
        seconds.append(len(frames) / 8000)
    return _split({"sound": pa.array(encoded, pa.binary()), "seconds": seconds, "label": pa.array(labels)}, rows)


def documents(rows: int) -> pa.Table:
    """Documents of 3 to 60 tokens of 1 to 63, each of which says the next one most of the time: tokens and split."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(2.8, 0.7, rows), 3, 60).astype(int)
    tokens = [(1 + (rng.integers(63) + np.arange(length) * 5 + (rng.random(length) < 0.1)) % 63) for length in lengths]
    return _split({"tokens": pa.array(tokens, pa.list_(pa.int32()))}, rows)


def pages(rows: int) -> pa.Table:
    """Words and images, which come as they lie in the text: input_ids, images and split. For each image, the ids have
    as many tokens `IMAGE` as the model makes of it, as a processor writes them.
    """
    rng, patches = np.random.default_rng(0), raylance.Patches("images", **PATCHES)
    ids: list[list[int]] = []
    images: list[list[bytes]] = []
    for _ in range(rows):
        count = 0 if rng.random() < 0.4 else min(6, int(rng.geometric(0.5)))
        ids.append(rng.integers(1, WORDS, rng.integers(2, 8)).tolist())
        images.append([])
        for _ in range(count):
            height, width = (int(each) for each in rng.integers(14, 140, 2))
            noise = PIL.Image.fromarray(rng.integers(0, 255, (3, 3, 3), dtype=np.uint8))
            images[-1].append(_encode(noise.resize((width, height)), "PNG"))
            _, high, wide = patches.grid(height, width)
            ids[-1] += [IMAGE] * (high * wide // patches.merge**2) + rng.integers(1, WORDS, rng.integers(1, 9)).tolist()
    columns = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "images": pa.array(images, pa.list_(pa.binary()))}
    return _split(columns, rows)


def episodes(rows: int) -> tuple[pa.Table, pa.Table]:
    """Rows, ten a second: state (arm x, y, disc x, y), action (dx, dy), and which frames the cameras top and side have
    (32 x 32). Then the videos, one of each episode and camera.
    """
    rng = np.random.default_rng(0)
    columns: dict[str, list[object]] = {"state": [], "action": []}
    pictures: dict[str, list[PIL.Image.Image]] = {"top": [], "side": []}
    arm, disc = np.zeros(2), np.zeros(2)
    for row in range(rows):
        if row % FRAMES == 0:
            arm, disc = rng.uniform(0.1, 0.9, (2, 2))
        has_disc = np.abs(arm - disc).max() < 0.1
        action = np.clip((0.5 if has_disc else disc) - arm, -0.1, 0.1) + rng.normal(0, 0.005, 2)
        for camera, (across, down) in (("top", (0, 1)), ("side", (1, 0))):
            picture = PIL.Image.new("RGB", (32, 32))
            draw = PIL.ImageDraw.Draw(picture)
            for place, colour in ((disc, "red"), (arm, "white")):
                x, y = 32 * place[across], 32 * place[down]
                draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=colour)
            pictures[camera].append(picture)
        columns["state"].append([*arm, *disc])
        columns["action"].append(action.tolist())
        arm, disc = arm + action, disc + action * has_disc
    types = {"state": pa.list_(pa.float32(), 4), "action": pa.list_(pa.float32(), 2)}
    made = {name: pa.array(values, types[name]) for name, values in columns.items()}
    frame, episode = np.arange(rows) % FRAMES, np.arange(rows) // FRAMES
    made |= {"episode_index": pa.array(episode), "timestamp": pa.array(frame / 10), "frame": pa.array(frame)}
    made |= {"top_video": pa.array(2 * episode), "side_video": pa.array(2 * episode + 1)}
    parts = [slice(begin, begin + FRAMES) for begin in range(0, rows, FRAMES)]
    files = [_video(pictures[camera][part]) for part in parts for camera in ("top", "side")]
    videos = pa.table([lance.blob_array(files)], schema=pa.schema([lance.blob_field("video_bytes")]))
    split = pa.array(["val" if number % 5 == 4 else "train" for number in episode])
    return pa.table(made | {"split": split}), videos


def videos_of(uri: str) -> str:
    """Returns where the videos of episodes lie."""
    return f"{uri.removesuffix('.lance')}-videos.lance"


def _video(pictures: list[PIL.Image.Image]) -> bytes:
    import av

    with av.open(out := io.BytesIO(), "w", format="mp4") as box:
        stream = box.add_stream("libx264", rate=10, options={"g": "10"})
        stream.width, stream.height, stream.pix_fmt = *pictures[0].size, "yuv420p"
        for picture in pictures:
            box.mux(stream.encode(av.VideoFrame.from_image(picture)))
        box.mux(stream.encode())
    return out.getvalue()


def _encode(picture: PIL.Image.Image, kind: str) -> bytes:
    picture.save(buffer := io.BytesIO(), kind)
    return buffer.getvalue()


def _split(columns: dict[str, pa.Array], rows: int) -> pa.Table:
    return pa.table(columns | {"split": pa.array(["val" if row % 5 == 4 else "train" for row in range(rows)])})


def main(argv: list[str] | None = None) -> int:
    """Runs the job; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("scenes", "sounds", "documents", "pages", "episodes"))
    parser.add_argument("uri", help="where the dataset is written")
    parser.add_argument("--count", type=int, default=400, metavar="N", help="rows (default: 400)")
    args = parser.parse_args(argv)
    if args.kind == "episodes":
        made, videos = episodes(args.count)
        lance.write_dataset(videos, videos_of(args.uri))
    else:
        makers = {"scenes": scenes, "sounds": sounds, "documents": documents, "pages": pages}
        made = makers[args.kind](args.count)
    lance.write_dataset(made, args.uri, max_rows_per_file=100)
    print(f"{args.uri}: {made.num_rows} rows of {args.kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
