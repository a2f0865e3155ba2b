"""Images that a GPU decodes, crops and patches of images and frames, and where boxes and points lie after a crop."""

from raylance.decode.crops import map_boxes, map_points
from raylance.decode.device_images import DeviceImage
from raylance.decode.frames import FrameCrop
from raylance.decode.images import ImageCrop
from raylance.decode.patches import FramePatches

__all__ = ["DeviceImage", "FrameCrop", "FramePatches", "ImageCrop", "map_boxes", "map_points"]
