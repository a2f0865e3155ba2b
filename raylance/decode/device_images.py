"""Decodes images on the trainer's device by nvImageCodec: JPEGs on CUDA with nvJPEG, on the CPU with libjpeg-turbo.

It decodes other formats differently from Pillow, or not at all, so `raylance.Image` decodes them. Crop and flip are
those of `Image`, from the same draws.
"""

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.dlpack

from raylance.decode.crops import Crop
from raylance.decode.decoder import BatchDecoder
from raylance.decode.images import Image, View, box_of_view, flips_view
from raylance.decode.pixels import CODEC, MAX_PIXELS, Truncated, orientation_if_plain, part_of, shown
from raylance.descriptions import OMIT_DEFAULT

_CODEC_OPTIONS = ":fancy_upsampling=1"  # interpolates colours like libjpeg-turbo


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceImage(BatchDecoder):
    """Decodes a column of JPEGs to uint8 images on the device of the batches.

    The trainer gets the encoded bytes, a third of the pixels' size or less, and the CPU cores that would decode stay
    free. But one thread of the trainer prepares all pictures, beside the one that trains: one H100 was fed with 3,100
    images/s, and with 4,600 by `Image` on 14 cores. So it helps if a GPU has fewer cores than about ten. Every process
    that decodes needs `pip install raylance[nvjpeg]`. Without CUDA, one thread of the trainer decodes on the CPU.

    Rows, bad rows, crops and flips are the same as for `raylance.Image` with the same arguments. Images that the device
    cannot decode are decoded by `Image` on the trainer's CPU: other formats, JPEGs in other colour spaces (CMYK),
    damaged images, and images that the codec refuses. `stats()` counts these images as `fallback_rows`. If there are
    more than a few of them, use `Image` instead of this class.

    The pixels depend on the codec and the device, which checkpoints name. On the CPU (nvImageCodec 0.9), they are equal
    to those of `Image`, byte for byte. On CUDA (an H100), all of 903 odd pictures that were intact were good, too, and
    98.8 % of their values lay within 2 of 255: nvJPEG rounds differently, and interpolates the colours of pictures of a
    few pixels differently. From 97 damaged JPEGs, it accepted one that `Image` refuses, and made other pixels of those
    that both accept.

    Attributes:
        column: Column of encoded images, binary.
        size: Output (height, width) in pixels, or one number for a square.
        augment: As in `Image`.
        hflip: As in `Image`.
        name: As in `Image`.
        max_pixels: As in `Image`.
        truncated: As in `Image`.
        setup: As in `Image`.
    """

    size: tuple[int, int] | int
    augment: Crop | None = None
    hflip: float = 0.0
    name: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    max_pixels: int | None = dataclasses.field(default=MAX_PIXELS, metadata=OMIT_DEFAULT)
    truncated: Truncated = dataclasses.field(default="refuse", metadata=OMIT_DEFAULT)
    setup: Callable[[], Any] | None = dataclasses.field(default=None, repr=False)

    dtype = np.dtype(np.uint8)
    channels_last, on_device, content = True, True, "images"

    def __post_init__(self) -> None:
        image = self._image  # checks the fields, and completes size and max_pixels
        object.__setattr__(self, "size", image.size)
        object.__setattr__(self, "max_pixels", image.max_pixels)

    @property
    def _image(self) -> Image:
        return Image(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (H, W, 3) of one decoded image, before a batch becomes tensors."""
        return self._image.shape

    @property
    def draws(self) -> int:
        """Number of uniform random numbers for each row, the same as for `Image`."""
        return self._image.draws

    @property
    def is_random(self) -> bool:
        """See `Decoder.is_random`."""
        return self._image.is_random

    @property
    def codec(self) -> str:
        """The codecs and the device that make the pixels in this process."""
        package = _package()
        ours = [f"nvimgcodec {importlib.metadata.version(package).partition('+')[0]}"] if package else []
        return ", ".join([*ours, CODEC, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"])

    def open(self) -> "_DeviceImages":  # type: ignore[override]
        """Opens a batch decoder that decodes on the CPU; see `open_on`."""
        return self.open_on(torch.device("cpu"))

    def open_on(self, device: torch.device) -> "_DeviceImages":
        """Opens a batch decoder that decodes on a device; see `BatchDecoder.open_on`.

        Raises:
            ImportError: If nvImageCodec is not installed.
        """
        return _DeviceImages(self._image, device)


class _DeviceImages:
    """Decodes images on one device, in one thread. `fallbacks` counts those that `Image` decoded."""

    @property
    def unturned(self) -> int:
        """Number of images whose orientation cannot be read."""
        return self._by_image.unturned

    def __init__(self, image: Image, device: torch.device) -> None:
        try:
            codec = importlib.import_module("nvidia.nvimgcodec")
        except ImportError as error:
            raise ImportError("nvImageCodec is not installed here: pip install 'raylance[nvjpeg]'") from error
        self._image, self._device, self._codec = image, device, codec
        # The codec reads the orientation differently from Pillow, and a file with two orientations kills the process.
        self._as_stored = codec.DecodeParams(apply_exif_orientation=False)
        self.fallbacks, self._by_image, self._memory = 0, image.open(), np.empty(image.shape, np.uint8)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._decoder = codec.Decoder(device_id=index, options=_CODEC_OPTIONS)
            self._kernel = _kernel(image.shape, device)
        else:
            self._decoder = codec.Decoder(
                device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
                backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
                max_num_cpu_threads=1,
                options=_CODEC_OPTIONS,
            )

    def decode_batch(self, encoded: Sequence[torch.Tensor], draws: npt.NDArray[np.float64], out: torch.Tensor) -> None:
        """Decodes images to `out`, uint8 (n, H, W, 3); see `OpenBatchDecoder`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        given: list[Any] = [each.numpy() for each in encoded]
        rules = self._image.rules
        turns = {row: turn for row, data in enumerate(given) if (turn := orientation_if_plain(memoryview(data), rules))}
        plain = [given[row] for row in turns]
        decoded = self._decoder.decode(plain, params=self._as_stored, cuda_stream=stream) if plain else []
        by_row = dict(zip(turns, decoded, strict=True))
        views: list[Any] = []
        for row, (data, numbers, made) in enumerate(zip(given, draws, out, strict=True)):
            if (image := by_row.get(row)) is None:
                self.fallbacks += 1
                self._by_image.decode_into(memoryview(data), numbers, self._memory)
                made.copy_(torch.from_numpy(self._memory))
            elif self._device.type == "cuda":
                if image.buffer_kind == self._codec.ImageBufferKind.STRIDED_HOST:
                    by_row[row] = image = image.cuda()
                views.append(self._view(image, turns[row], numbers, row))
            else:
                pixels = shown(np.asarray(image), turns[row])
                box = box_of_view(self._image, pixels.shape[0], pixels.shape[1], numbers)
                View(self._image, numbers, made.numpy()).write(part_of(pixels, box))
        if views:
            # The codec frees the images in the order of the stream: not before the kernel has read them.
            self._kernel.resize_views(views, out)

    def _view(self, image: Any, orientation: int, draws: npt.NDArray[np.float64], row: int) -> Any:
        stored = image.__cuda_array_interface__
        height, width = stored["shape"][:2] if orientation <= 4 else stored["shape"][1::-1]
        box, flips = box_of_view(self._image, height, width, draws), flips_view(self._image, draws)
        return view_of(stored["data"][0], stored["shape"], orientation, box, flips=flips, row=row)


def view_of(
    address: int, shape: tuple[int, ...], orientation: int, box: tuple[int, int, int, int], *, flips: bool, row: int
) -> tuple[int, ...]:
    """Describes a `box` of a displayed image, which becomes row `row` of the output, to the resizing kernel. `address`
    is that of the stored pixels, uint8 of `shape` (h, w, 3), contiguous; `orientation` is 1 to 8, as in EXIF. Returns
    the address of the box's first displayed pixel; bytes from one displayed row to the next, and from one column to the
    next, negative if they are mirrored; height and width of the box in pixels; `flips`; `row`.
    """
    (height, width), (row_bytes, column_bytes) = shape[:2], (3 * shape[1], 3)
    if orientation > 4:
        height, width, row_bytes, column_bytes = width, height, column_bytes, row_bytes
    if orientation in (3, 4, 7, 8):
        address, row_bytes = address + (height - 1) * row_bytes, -row_bytes
    if orientation in (2, 3, 6, 7):
        address, column_bytes = address + (width - 1) * column_bytes, -column_bytes
    left, top, box_width, box_height = box
    return address + top * row_bytes + left * column_bytes, row_bytes, column_bytes, box_height, box_width, flips, row


def _kernel(shape: tuple[int, ...], device: torch.device) -> Any:
    """Returns the module of the kernel that resizes on CUDA, compiled: a batch must not find that it cannot be."""
    try:
        kernel = importlib.import_module("raylance.decode.resizing")
    except ImportError as error:
        raise ImportError("Triton, which torch's packages for CUDA bring, is not installed here") from error
    pixel = torch.zeros(3, dtype=torch.uint8, device=device)
    view = view_of(pixel.data_ptr(), (1, 1, 3), 1, (0, 0, 1, 1), flips=False, row=0)
    kernel.resize_views([view], torch.empty((1, *shape), dtype=torch.uint8, device=device))
    return kernel


def _package() -> str | None:
    """Returns the name of the installed nvImageCodec package, which differs by CUDA version; None if there is none."""
    found = importlib.metadata.packages_distributions().get("nvidia", [])
    return next((name for name in sorted(set(found)) if name.startswith("nvidia-nvimgcodec")), None)
