"""Images that a GPU decodes, crops of images and of frames, and where boxes and points lie after a crop."""

from raylance.decode.crops import map_boxes, map_points
from raylance.decode.device_images import DeviceImage
from raylance.decode.frames import FrameCrop
from raylance.decode.images import ImageCrop

__all__ = ["DeviceImage", "FrameCrop", "ImageCrop", "map_boxes", "map_points"]
