"""Digests of pixels, also on processors that can do less."""

import hashlib
import os
import subprocess
import sys

import numpy as np

import raylance
from raylance.decode.images import Image
from tests.helpers.images import (
    KINDS,
    picture,
)


def digest() -> str:
    """A hash of every kind of JPEG, decoded and augmented."""
    found = hashlib.sha256()
    image = Image("image", size=(37, 50), augment=raylance.RandomResizedCrop(), hflip=0.5)
    rows, out = image.open(), np.empty(image.shape, np.uint8)
    for number, make in enumerate(KINDS.values()):
        data = make(picture(211 + number, 160, number))
        for draw in range(4):
            rows.decode_into(data, np.random.default_rng((number, draw)).random(41), out)
            found.update(out.tobytes())
    return found.hexdigest()


def digest_elsewhere(**setting: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"from {__name__} import digest; print(digest())"]
    return subprocess.Popen(command, env=os.environ | setting, stdout=subprocess.PIPE, text=True)
