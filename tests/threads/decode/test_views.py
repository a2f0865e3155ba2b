"""Several arrays of one image: views, decoders with names, drawn crops, and coordinates."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import torch
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance import Image, RandomResizedCrop
from raylance.errors import ConfigError
from raylance.images import ImageCrop, map_boxes, map_points
from tests.helpers.images import encode, make_images

CROPS: dict[str, Any] = {"augment": RandomResizedCrop(scale=(0.2, 1.0)), "hflip": 0.5}
ROWS = 24


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    """Photographs and masks of them; row 3 has only the first half of its bytes."""
    images = make_images(ROWS, size=(40, 56))
    images[3] = images[3][: len(images[3]) // 2]
    masks = [encode(np.full((40, 56), row, np.uint8)) for row in range(ROWS)]
    columns = {"image": pa.array(images, pa.binary()), "mask": pa.array(masks, pa.binary())}
    return write_dataset(pa.table({"id": np.arange(ROWS), **columns}))


def open_images(uri: str, *decoders: raylance.Decoder, **changes: Any) -> raylance.Dataset:
    arguments = {"on_bad_row": "mask", "order": "sequential", "remainder": "ragged"} | changes
    return raylance.dataset(uri, decode=decoders, **arguments)


def test_views_are_crops_by_draws_of_their_own(uri: str) -> None:
    handle = open_images(uri, Image("image", size=(16, 20), views=3, **CROPS))
    assert handle.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), (3, 16, 20, 3))
    with handle.loader(num_decoders=2) as loader:
        epochs = [next(iter(loader.iter_batches(batch_size=ROWS))) for _ in range(2)]
        (tensors,) = loader.iter_torch_batches(batch_size=ROWS)
    good = epochs[0]["_valid"]
    assert np.flatnonzero(~good).tolist() == [3]
    seen = [view.tobytes() for batch in epochs for row in batch["image"][good] for view in row]
    assert len(set(seen)) == len(seen)
    assert tensors["image"].shape == (ROWS, 3, 3, 16, 20)
    assert tensors["image"].flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    again = raylance.dataset(uri, decode=Image("image", size=(16, 20), views=3, **CROPS), on_bad_row="mask").take(
        [5, 9]
    )
    np.testing.assert_array_equal(again["image"], epochs[0]["image"][[5, 9]])


def test_a_mask_follows_every_view(uri: str, write_dataset: Callable[..., str]) -> None:
    rng = np.random.default_rng(1)
    classes = [rng.integers(0, 256, (30, 41), dtype=np.uint8) for _ in range(10)]
    images = pa.array([encode(np.stack([each] * 3, -1)) for each in classes], pa.binary())
    masks = pa.array([encode(each) for each in classes], pa.binary())
    both = raylance.dataset(
        write_dataset(pa.table({"image": images, "mask": masks})),
        decode=[
            Image("mask", like="image", mode="L", interpolation="nearest"),
            Image("image", size=16, views=2, interpolation="nearest", **CROPS),
        ],
    ).head(10)
    assert both["mask"].shape == (10, 2, 16, 16, 1)
    np.testing.assert_array_equal(both["mask"][..., 0], both["image"][..., 0])
    with pytest.raises(ConfigError, match="views=3.*2 views"):
        open_images(uri, Image("image", size=8, views=2), Image("mask", like="image", views=3))


def test_one_column_under_several_names_is_decoded_once(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting of DINO: two large views and six small ones. Each is what it would be by itself."""
    large = Image("image", name="large", size=32, views=2, **CROPS)
    small = Image("image", name="small", size=12, views=6, augment=RandomResizedCrop(scale=(0.05, 0.3)))
    whole, grey = Image("image", size=20), Image("image", name="grey", like="large", mode="L")
    decoders = (large, small, whole, grey)
    alone: dict[str, np.ndarray] = {}
    for each in (large, small, whole):
        alone[each.output_name] = open_images(uri, each, columns=["id", "image"]).head(ROWS)[each.output_name]
    calls, real = [], simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *a, **k: calls.append(1) or real(*a, **k))
    handle = open_images(uri, *decoders, columns=["image", "id"])
    assert handle.schema.names == ["large", "small", "image", "grey", "id"]
    calls.clear()
    batch = handle.head(ROWS)
    assert len(calls) == ROWS, "one decode a row: the grey one is Pillow's"
    assert batch["_valid"].sum() == ROWS - 1
    for name, pixels in alone.items():
        np.testing.assert_array_equal(batch[name], pixels, name)
    assert batch["grey"].shape == (ROWS, 2, 32, 32, 1)
    assert not batch["large"][3].any()
    state = handle.loader().state_dict()
    assert [each.get("name") for each in state["decode"]] == ["large", "small", None, "grey"]
    assert set(state["codecs"]) == {"large", "small", "image", "grey"}


def test_names_are_checked(uri: str) -> None:
    image = Image("image", size=8)
    for decoders, message in (
        ([image, image], "'image' .*2 times"),
        (
            [image, Image("image", size=4, name="id")],
            r"Image\('image', name='id'\): .*'id'",
        ),
        ([Image("image", size=4, name="_valid")], "another column '_valid'"),
        ([image, ImageCrop("mask", like="image")], r"boxes lie in images of that column\. Write ImageCrop\('image'"),
        ([ImageCrop("image")], "must name a decoded column"),
        ([Image("image", size=8, decode_fn=len), ImageCrop("image")], "none of|whose crop is not known"),
    ):
        with pytest.raises(raylance.RaylanceError, match=message):
            open_images(uri, *decoders)
    with pytest.raises(ConfigError, match="views=0: must be an integer of at least 1"):
        Image("image", size=4, views=0)
    free = open_images(uri, Image("mask", size=8, name="image_2"), Image("image", size=4, name="mask"))
    assert free.schema.names == ["id", "mask", "image_2"]
    assert free.head(1)["mask"].shape == (1, 4, 4, 3)


@pytest.mark.parametrize("views", [1, 2])
def test_what_lies_at_a_point_lies_where_the_point_is_mapped_to(write_dataset: Callable[..., str], views: int) -> None:
    """One white square in each picture; its box is mapped to where the white pixels are."""
    rng, images, boxes = np.random.default_rng(3), [], []
    for _ in range(30):
        high, wide = rng.integers(60, 120, 2)
        left, top = rng.integers(0, wide - 20), rng.integers(0, high - 20)
        picture = np.zeros((high, wide, 3), np.uint8)
        picture[top : top + 20, left : left + 20] = 255
        images.append(encode(picture))
        boxes.append([[left, top, left + 20, top + 20]])
    size = (48, 64)
    table = pa.table(
        {"image": pa.array(images, pa.binary()), "boxes": pa.array(boxes, pa.list_(pa.list_(pa.int64(), 4)))}
    )
    decode_ = [Image("image", size=size, views=views, **CROPS), ImageCrop("image")]
    batch = raylance.dataset(write_dataset(table), decode=decode_).head(30)
    assert batch["image_crop"].dtype == np.int32
    assert batch["image_crop"].shape == ((30, 7) if views == 1 else (30, views, 7))
    shown = flipped = 0
    for row in range(30):
        pixels, crops = batch["image"][row].reshape(views, *size, 3), batch["image_crop"][row].reshape(views, 7)
        for view in range(views):
            mapped, keep = map_boxes(batch["boxes"][row], crops[view], size)
            white = np.argwhere(pixels[view, ..., 0] > 127)
            if not keep.any() or mapped.min() < 0 or min(mapped[0, 2:] - mapped[0, :2]) < 4:
                continue
            shown += 1
            flipped += int(crops[view, 6])
            low, high = white.min(axis=0)[::-1], white.max(axis=0)[::-1] + 1
            np.testing.assert_allclose(mapped[0], [*low, *high], atol=1.6)
    assert shown > 10
    assert flipped > 2


@given(
    st.lists(st.tuples(*[st.floats(-50, 250)] * 4), max_size=5),
    st.integers(0, 60),
    st.integers(1, 90),
    st.booleans(),
    st.floats(0, 1),
)
def test_mapped_boxes_lie_inside_and_keep_their_share(
    given_boxes: list[Any], left: int, width: int, flips: bool, least: float
) -> None:
    boxes = np.array([[min(a, c), min(b, d), max(a, c), max(b, d)] for a, b, c, d in given_boxes]).reshape(-1, 4)
    crop, size = np.array([left, 5, width, 40, 200, 100, flips]), (32, 48)
    mapped, keep = map_boxes(boxes, crop, size, least_visible=least)
    assert mapped.shape == (keep.sum(), 4)
    assert (mapped >= 0).all()
    assert (mapped <= [48, 32, 48, 32]).all()
    for box, made in zip(boxes[keep], mapped, strict=True):
        visible = math.prod(made[2:] - made[:2]) / (48 / width * 32 / 40)
        assert visible >= least * math.prod(box[2:] - box[:2]) * (1 - 1e-6) - 1e-6
    points = map_points(boxes.reshape(-1, 2, 2), crop, size)
    assert points.shape == (len(boxes), 2, 2)


def test_boxes_are_mapped_for_each_view_and_for_none_of_a_masked_row() -> None:
    boxes, size = np.array([[10, 5, 30, 25], [0, 0, 4, 4], [90, 30, 100, 40]]), 224
    crops = np.array([[0, 0, 100, 50, 100, 50, 0], [5, 5, 20, 30, 100, 50, 1], [0, 0, 0, 0, 0, 0, 0]])
    alone = [map_boxes(boxes, crop, (size, size)) for crop in crops]
    made, keep = map_boxes(boxes, crops, size)
    assert keep.tolist() == [each.tolist() for _, each in alone] == [[True] * 3, [True, False, False], [False] * 3]
    for ours, (wanted, _) in zip(made, alone, strict=True):
        np.testing.assert_array_equal(ours, wanted)
    points = map_points(boxes[:, :2], crops, size)
    assert points.shape == (3, 3, 2)
    np.testing.assert_array_equal(points[1], map_points(boxes[:, :2], crops[1], (size, size)))
    assert np.isnan(points[2]).all()
    for none in ([], np.empty((0, 4))):
        assert [len(view) for view in map_boxes(none, crops, size)[0]] == [0, 0, 0]
    assert map_points([], crops[0], size).shape == (0, 2)  # it was a ConfigError


@pytest.mark.parametrize(
    ("boxes", "crop", "size", "message"),
    [
        (np.zeros((4, 5)), np.ones(7), 8, r"boxes of shape \(4, 5\) cannot be mapped: give \(k, 4\)"),
        (np.zeros(8), np.ones(7), 8, r"boxes of shape \(8,\)"),
        (np.zeros((2, 4, 4)), np.ones(7), 8, r"boxes of shape \(2, 4, 4\)"),
        (np.zeros((2, 4)), np.ones(6), 8, r"crop of shape \(6,\) cannot be mapped: give \(7,\) or \(views, 7\)"),
        (np.zeros((2, 4)), np.ones((9, 2, 7)), 8, r"crop of shape \(9, 2, 7\)"),
        (np.zeros((2, 4)), np.ones(7), (8, 8, 3), r"size=\(8, 8, 3\): must be \(height, width\)"),
        (np.zeros((2, 4)), np.ones(7), 0, "size=0: must be"),
    ],
)
def test_what_cannot_be_mapped(boxes: Any, crop: Any, size: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        map_boxes(boxes, crop, size)


def test_a_damaged_image_has_no_crop(uri: str) -> None:
    """Its head can be parsed."""
    batch = open_images(uri, ImageCrop("image"), Image("image", size=8, **CROPS)).head(5)
    assert batch["_valid"].tolist() == [True, True, True, False, True]
    assert not batch["image_crop"][3].any()
    assert batch["image_crop"][[0, 1, 2, 4], 4:6].tolist() == [[56, 40]] * 4
