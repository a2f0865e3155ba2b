"""Owns the networks and what one step of them computes; never reads a row, never reports."""

import math
from typing import Any

import torch
from torch import nn

import raylance

WARM_UP = 0.05  # of the run, as a fraction


def small_cnn(classes: int) -> nn.Module:
    """A network of 140,000 weights for images from 8x8 up."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    fine = [*block(3, 32), *block(32, 64), nn.MaxPool2d(2)]
    coarse = [*block(64, 64), *block(64, 128), nn.AdaptiveMaxPool2d(2)]  # (N, 128, 2, 2)
    return nn.Sequential(*fine, *coarse, nn.Flatten(), nn.Linear(4 * 128, classes))


def build_model(name: str, classes: int) -> nn.Module:
    """Builds a network with random weights, from float images (N, 3, H, W) to scores (N, classes)."""
    if name == "small_cnn":
        return small_cnn(classes)
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # the latter when it was built for another torch
        raise raylance.ConfigError(
            f"--model {name} is torchvision's, which cannot be imported ({error}). Nothing can be trained. pip install "
            "torchvision on every node, or use --model small_cnn."
        ) from error
    known = models.list_models(module=models)
    if name not in known:
        raise raylance.ConfigError(
            f"--model {name} is unknown. Nothing can be trained. Use small_cnn or one of torchvision's {len(known)} "
            "classifiers, such as resnet18."
        )
    return models.get_model(name, weights=None, num_classes=classes)


def scores_of(model: nn.Module, images: torch.Tensor, precision: str) -> torch.Tensor:
    """Scores (N, classes) of uint8 images (N, 3, H, W). They become floats only here: the device gets bytes."""
    bf16 = precision == "bf16" or (precision == "auto" and images.is_cuda)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        scores: torch.Tensor = model(images.float().div_(127.5).sub_(1))
    return scores.float()


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then half a cosine down to zero; `progress` is the fraction of the run that is done."""
    return peak * min(1.0, progress / WARM_UP) * 0.5 * (1 + math.cos(math.pi * progress))


def check_network(saved: dict[str, Any], network: list[Any]) -> None:
    """Refuses the state of a checkpoint that is not of this network, (name, classes)."""
    if (held := saved.get("network")) != network:
        raise raylance.StateError(
            f"the checkpoint is of model and classes {held}, not of {network}. Its weights do not fit. Ask for the "
            "same, or give another --run-name."
        )


def check_model(name: str, classes: int, train: raylance.Dataset, image: str) -> None:
    """Runs the model without memory or arithmetic, so that a misfit shows now and not in the workers."""
    height, width, _ = train.schema.field(image).type.shape
    with torch.device("meta"):
        model = build_model(name, classes)
        try:
            made = tuple(model(torch.empty(2, 3, height, width)).shape)
        except (RuntimeError, ValueError, AssertionError, AttributeError) as error:
            made = str(error)
    if made != (2, classes):
        raise raylance.ConfigError(
            f"--model {name} cannot classify images of {height}x{width} into {classes} classes ({made}). Training "
            "would fail. Give another --image-size or --model."
        )
