"""Owns the decoding of images on the trainer's device, by nvImageCodec; never reads storage, never chooses a crop.

nvImageCodec decodes JPEGs: on CUDA with nvJPEG, on the CPU with libjpeg-turbo. It decodes other formats differently
from Pillow, or not at all, so `raylance.Image` decodes them. Crop and flip are those of `Image`, from the same draws.
"""

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.dlpack

from raylance.decode.crops import Crop
from raylance.decode.decoder import BatchDecoder
from raylance.decode.images import Image, box_of_view, flips_view
from raylance.decode.pixels import CODEC, MAX_PIXELS, orientation_if_plain
from raylance.planning.state import OMIT_DEFAULT

_TOGETHER = 64  # images that are written to the batch together: 38 MB of floats at 224 x 224
_CODEC_OPTIONS = ":fancy_upsampling=1"  # interpolates colours like libjpeg-turbo


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceImage(BatchDecoder):
    """Decodes a column of JPEGs to uint8 images on the device of the batches.

    The trainer gets the encoded bytes, and its device decodes, crops, resizes and flips. The bytes are a third of the
    pixels' size or less, and the CPU cores that would decode stay free, but the GPU has more work during training.
    Every process that decodes needs `pip install raylance[nvjpeg]`. Without CUDA, one thread of the trainer decodes on
    the CPU.

    Rows, bad rows, crops and flips are the same as for `raylance.Image` with the same arguments. Images that the device
    cannot decode are decoded by `Image` on the trainer's CPU: other formats, JPEGs in other colour spaces (CMYK),
    damaged images, and images that the codec refuses. `stats()` counts these images as `fallback_rows`. If there are
    more than a few of them, use `Image` instead of this class.

    The pixels depend on the codec and the device, which checkpoints name. On the CPU, they are equal to the pixels of
    `Image`. This was checked byte for byte with nvImageCodec 0.9, for JPEGs of each subsampling, baseline and
    progressive, grey, RGB, with restart markers, of each EXIF orientation, followed by other bytes, truncated, with
    markers among the pixels; and for PNG, WebP, GIF, AVIF, BMP, TGA, PPM, JPEG 2000 and TIFF of all modes that Pillow
    writes. On CUDA, it was not checked.

    Attributes:
        column: Column of encoded images, binary.
        size: Output (height, width) in pixels, or one number for a square.
        augment: As in `Image`.
        hflip: As in `Image`.
        name: As in `Image`.
        max_pixels: As in `Image`.
    """

    size: tuple[int, int] | int
    augment: Crop | None = None
    hflip: float = 0.0
    name: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    max_pixels: int | None = dataclasses.field(default=MAX_PIXELS, metadata=OMIT_DEFAULT)

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
    """Decodes images on one device, in one thread.

    Attributes:
        fallbacks: Number of images that `Image` decoded.
    """

    def __init__(self, image: Image, device: torch.device) -> None:
        try:
            codec = importlib.import_module("nvidia.nvimgcodec")
        except ImportError as error:
            raise ImportError("nvImageCodec is not installed here: pip install 'raylance[nvjpeg]'") from error
        self._image, self._device, self._codec = image, device, codec
        # The codec reads the orientation differently from Pillow, and a file with two orientations kills the process.
        self._as_stored = codec.DecodeParams(apply_exif_orientation=False)
        self.fallbacks, self._by_image, self._memory = 0, image.open(), np.empty(image.shape, np.uint8)
        # On the CPU, torch resizes integers. Elsewhere, it resizes floats; rounded, they differ by one at most.
        self._dtype = torch.uint8 if device.type == "cpu" else torch.float32
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._decoder = codec.Decoder(device_id=index, options=_CODEC_OPTIONS)
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
        limit = self._image.max_pixels
        turns = {row: turn for row, data in enumerate(given) if (turn := orientation_if_plain(memoryview(data), limit))}
        plain = [given[row] for row in turns]
        decoded = self._decoder.decode(plain, params=self._as_stored, cuda_stream=stream) if plain else []
        by_row = dict(zip(turns, decoded, strict=True))
        for begin in range(0, len(given), _TOGETHER):
            part = slice(begin, begin + _TOGETHER)
            images = [
                self._by_fallback(data, numbers)
                if (image := by_row.get(row)) is None
                else self._fit(self._stored(image, turns[row]), numbers)
                for row, (data, numbers) in enumerate(zip(given[part], draws[part], strict=True), begin)
            ]
            # What all images need is done for many at once: to start a kernel costs more than the kernel.
            together = torch.cat(images)
            if together.is_floating_point():
                together = together.round_().clamp_(0, 255)
            out[part].copy_(together.permute(0, 2, 3, 1))

    def _stored(self, image: Any, orientation: int) -> torch.Tensor:
        """Returns what the codec decoded, uint8 (h, w, 3) on the device, turned as it is displayed."""
        on_cpu = image.buffer_kind == self._codec.ImageBufferKind.STRIDED_HOST  # DLPack would use CUDA even then
        pixels = torch.from_numpy(np.asarray(image)) if on_cpu else torch.utils.dlpack.from_dlpack(image)
        return _turned(pixels.to(self._device), orientation)

    def _by_fallback(self, data: npt.NDArray[np.uint8], draws: npt.NDArray[np.float64]) -> torch.Tensor:
        """Returns an image that `Image` decodes, crops, resizes and flips, (1, 3, H, W) on the device."""
        self.fallbacks += 1
        self._by_image.decode_into(memoryview(data), draws, self._memory)
        return torch.from_numpy(self._memory).permute(2, 0, 1)[None].to(self._device, self._dtype, copy=True)

    def _fit(self, pixels: torch.Tensor, draws: npt.NDArray[np.float64]) -> torch.Tensor:
        """Crops, resizes and flips an image, uint8 (h, w, 3); returns (1, 3, H, W), not rounded if it is of floats."""
        left, top, width, height = box_of_view(self._image, pixels.shape[0], pixels.shape[1], draws)
        part = pixels[top : top + height, left : left + width].permute(2, 0, 1)[None]
        part = part.to(self._dtype, memory_format=torch.channels_last)
        if part.shape[2:] != (size := self._image.shape[:2]):
            part = torch.nn.functional.interpolate(part, size=size, mode="bilinear", antialias=True)
        return part.flip(3) if flips_view(self._image, draws) else part


def _turned(stored: torch.Tensor, orientation: int) -> torch.Tensor:
    """Returns stored pixels (h, w, 3) turned and mirrored as they are displayed."""
    shown = stored.transpose(0, 1) if orientation > 4 else stored
    axes = [axis for axis, turns in ((0, (3, 4, 7, 8)), (1, (2, 3, 6, 7))) if orientation in turns]
    return shown.flip(axes) if axes else shown  # `flip` copies, even without axes


def _package() -> str | None:
    """Returns the name of the installed nvImageCodec package, which differs by CUDA version; None if there is none."""
    found = importlib.metadata.packages_distributions().get("nvidia", [])
    return next((name for name in sorted(set(found)) if name.startswith("nvidia-nvimgcodec")), None)
