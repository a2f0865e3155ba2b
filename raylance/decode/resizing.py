"""The kernel that crops, resizes and flips many images of a GPU at once.

The weights are those of torch's `interpolate(mode="bilinear", antialias=True)`. torch resizes one image a call, by
several kernels and with an image of floats between them; to start these costs more time of Python than the work costs
the GPU.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 128  # output pixels of a program


def resize_views(views: Sequence[tuple[int, ...]], out: torch.Tensor) -> None:
    """Crops, resizes and flips images in the memory of a GPU, on its current stream.

    Args:
        views: The parts, as `device_images.view_of` gives them. Their memory must stay until the stream has read it.
        out: Images uint8 (n, H, W, 3), contiguous, on the GPU. Rows that no view names stay as they are.
    """
    table, (_, height, width, _) = torch.tensor(views, dtype=torch.int64), out.shape
    on_device: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # Triton's interpreter, in tests
    if out.is_cuda:
        table, on_device = table.pin_memory().to(out.device, non_blocking=True), torch.cuda.device(out.device)
    with on_device:  # Triton starts kernels on the current device
        _resize[len(views), triton.cdiv(height * width, _BLOCK)](table, out, height, width, block=_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _resize(views, out, out_height, out_width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    view = views + tl.program_id(0) * 7
    image = tl.load(view).to(tl.pointer_type(tl.uint8))
    row_bytes, column_bytes = tl.load(view + 1), tl.load(view + 2)
    height, width = tl.load(view + 3).to(tl.int32), tl.load(view + 4).to(tl.int32)
    pixel = tl.program_id(1) * block + tl.arange(0, block)
    inside = pixel < out_height * out_width
    row, column = pixel // out_width, pixel % out_width
    if tl.load(view + 5) != 0:
        column = out_width - 1 - column
    scale_y, scale_x = height.to(tl.float32) / out_height, width.to(tl.float32) / out_width
    reach_y, reach_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
    center_y, center_x = scale_y * (row + 0.5), scale_x * (column + 0.5)
    first_y = tl.maximum((center_y - reach_y + 0.5).to(tl.int32), 0)
    first_x = tl.maximum((center_x - reach_x + 0.5).to(tl.int32), 0)
    red = tl.zeros([block], tl.float32)
    green = tl.zeros([block], tl.float32)
    blue = tl.zeros([block], tl.float32)
    total = tl.zeros([block], tl.float32)
    for step_y in range(2 * reach_y.to(tl.int32) + 3):
        y = first_y + step_y
        weight_y = tl.maximum(1.0 - tl.abs(y - center_y + 0.5) / reach_y, 0.0)
        weight_y = tl.where(y < height, weight_y, 0.0)
        for step_x in range(2 * reach_x.to(tl.int32) + 3):
            x = first_x + step_x
            weight = weight_y * tl.maximum(1.0 - tl.abs(x - center_x + 0.5) / reach_x, 0.0)
            weight = tl.where(x < width, weight, 0.0)
            wanted = inside & (weight > 0.0)
            place = image + y.to(tl.int64) * row_bytes + x.to(tl.int64) * column_bytes
            red += weight * tl.load(place, wanted, other=0).to(tl.float32)
            green += weight * tl.load(place + 1, wanted, other=0).to(tl.float32)
            blue += weight * tl.load(place + 2, wanted, other=0).to(tl.float32)
            total += weight
    made = out + (tl.load(view + 6) * out_height * out_width + pixel) * 3
    tl.store(made, tl.floor(red / total + 0.5).to(tl.uint8), inside)
    tl.store(made + 1, tl.floor(green / total + 0.5).to(tl.uint8), inside)
    tl.store(made + 2, tl.floor(blue / total + 0.5).to(tl.uint8), inside)
