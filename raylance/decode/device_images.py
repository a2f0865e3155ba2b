"""Owns the decoding of images on the trainer's device, by nvImageCodec; never reads storage, never chooses a crop.

On CUDA, nvImageCodec decodes JPEGs by nvJPEG, and what nvJPEG does not take on the CPU; on the CPU, by libjpeg-turbo.
Crop and flip are those of `raylance.Image`, by the same draws.
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
from raylance.planning.state import OMIT_DEFAULT

_CODEC_OPTIONS = ":fancy_upsampling=1"  # interpolates colours as libjpeg-turbo does


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceImage(BatchDecoder):
    """How encoded images (JPEG, PNG, WebP, …) become uint8 (N, H, W, 3) on the device of the batches.

    The encoded bytes travel to the trainer, a third of the pixels or less, and its device decodes, crops, resizes and
    flips: the cores that decode are free, and the GPU has work beside training. It needs `pip install raylance[nvjpeg]`
    wherever it decodes; where there is no CUDA, it decodes on the CPU, in one thread of the trainer. Rows, crops and
    flips are those of `raylance.Image` of the same arguments. Pixels are those of one codec and device, which
    checkpoints name; on the CPU they are those of `Image`.

    Attributes:
        column: Column of encoded images, binary.
        size: Output (height, width) in pixels, or one number for a square.
        augment: As that of `Image`.
        hflip: As that of `Image`.
        name: As that of `Image`.
    """

    size: tuple[int, int] | int
    augment: Crop | None = None
    hflip: float = 0.0
    name: str | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)

    dtype = np.dtype(np.uint8)
    channels_last, on_device, content = True, True, "images"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self._image.size)  # checked, and whole

    @property
    def _image(self) -> Image:
        return Image(self.column, size=self.size, augment=self.augment, hflip=self.hflip, name=self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Output shape (H, W, 3) of one image."""
        return self._image.shape

    @property
    def draws(self) -> int:
        """Those of `Image`."""
        return self._image.draws

    @property
    def is_random(self) -> bool:
        """See `Decoder.is_random`."""
        return self._image.is_random

    @property
    def codec(self) -> str:
        """What makes the pixels in this process, and where."""
        versions = [
            f"{name} {importlib.metadata.version(package).partition('+')[0]}"
            for name, package in (("nvimgcodec", _package()), ("torch", "torch"))
            if package
        ]
        return ", ".join([*versions, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"])

    def open(self) -> "_DeviceImages":  # type: ignore[override]
        """As `open_on` the CPU."""
        return self.open_on(torch.device("cpu"))

    def open_on(self, device: torch.device) -> "_DeviceImages":
        """Opens a codec on a device, with memory of its own.

        Raises:
            ImportError: Without nvImageCodec.
        """
        return _DeviceImages(self._image, device)


class _DeviceImages:
    """Decodes images on one device, in one thread."""

    def __init__(self, image: Image, device: torch.device) -> None:
        try:
            codec = importlib.import_module("nvidia.nvimgcodec")
        except ImportError as error:
            raise ImportError("nvImageCodec is not installed here: pip install 'raylance[nvjpeg]'") from error
        self._image, self._device, self._codec = image, device, codec
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
        decoded = self._decoder.decode([each.numpy() for each in encoded], cuda_stream=stream)
        for image, numbers, made in zip(decoded, draws, out, strict=True):
            if image is None:
                raise ValueError("nvImageCodec cannot decode it")
            on_cpu = image.buffer_kind == self._codec.ImageBufferKind.STRIDED_HOST  # DLPack asks CUDA then, too
            pixels = torch.from_numpy(np.asarray(image)) if on_cpu else torch.utils.dlpack.from_dlpack(image)
            self._write(pixels.to(self._device), numbers, made)

    def _write(self, pixels: torch.Tensor, draws: npt.NDArray[np.float64], out: torch.Tensor) -> None:
        """Crops, resizes and flips the pixels of an image, uint8 (h, w, 3), into its memory (H, W, 3)."""
        left, top, width, height = box_of_view(self._image, pixels.shape[0], pixels.shape[1], draws)
        part = pixels[top : top + height, left : left + width].permute(2, 0, 1)[None]
        if part.shape[2:] != out.shape[:2]:
            part = _resize(part, (out.shape[0], out.shape[1]))
        out.copy_((part.flip(3) if flips_view(self._image, draws) else part)[0].permute(1, 2, 0))


def _resize(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Bilinear antialiased resize of uint8 (1, 3, h, w). On the CPU torch has a kernel for whole numbers; elsewhere
    rounded fractions differ from it by one at most.
    """
    how: dict[str, Any] = {"size": size, "mode": "bilinear", "antialias": True}
    if pixels.device.type == "cpu":
        return torch.nn.functional.interpolate(pixels.contiguous(memory_format=torch.channels_last), **how)
    return torch.nn.functional.interpolate(pixels.float(), **how).round_().clamp_(0, 255).to(torch.uint8)


def _package() -> str | None:
    """Name of the installed package of nvImageCodec, which has one for each version of CUDA."""
    found = importlib.metadata.packages_distributions().get("nvidia", [])
    return next((name for name in sorted(set(found)) if name.startswith("nvidia-nvimgcodec")), None)
