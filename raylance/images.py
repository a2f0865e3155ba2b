"""Crops of images and of frames, and where boxes and points of an image lie after a crop."""

from raylance.decode.crops import map_boxes, map_points
from raylance.decode.frames import FrameCrop
from raylance.decode.images import ImageCrop

__all__ = ["FrameCrop", "ImageCrop", "map_boxes", "map_points"]
