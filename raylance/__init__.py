"""The public names of raylance, each loaded at its first use."""

import importlib
from typing import TYPE_CHECKING, Any

from raylance._version import __version__ as __version__

if TYPE_CHECKING:
    from raylance import audit as audit
    from raylance import lerobot as lerobot
    from raylance import testing as testing
    from raylance import torch_data as torch_data
    from raylance import torchft as torchft
    from raylance.api.batches import Batches
    from raylance.api.dataset import Dataset
    from raylance.api.loader import RankLoader
    from raylance.api.mixing import mix
    from raylance.api.opening import dataset
    from raylance.api.ray_data import from_ray_dataset
    from raylance.batches.varlen import cu_seqlens
    from raylance.decode.arrays import Pad
    from raylance.decode.clips import Clip
    from raylance.decode.crops import CenterCrop, RandomResizedCrop, map_boxes, map_points
    from raylance.decode.decoder import BatchDecoder, Decoder, RaggedDecoder
    from raylance.decode.device_images import DeviceImage
    from raylance.decode.frames import FrameCrop
    from raylance.decode.images import Image, ImageCrop
    from raylance.errors import (
        BadRowError,
        ConfigError,
        CoverageError,
        DatasetError,
        HelperError,
        PlacementError,
        RaylanceError,
        StateError,
    )
    from raylance.integrations.checkpoint_files import newest_checkpoint
    from raylance.integrations.checkpoints import report, restore
    from raylance.integrations.data_config import DataConfig
    from raylance.integrations.fail_fast import FailFast
    from raylance.integrations.lineage import mlflow_dataset, wandb_artifact
    from raylance.integrations.preemption import report_if_preempted
    from raylance.observe.record import open_folder
    from raylance.orders.buckets import Buckets
    from raylance.orders.order import Order
    from raylance.orders.permutation import row_rng
    from raylance.orders.sampling import ClassBalanced, Weighted
    from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle
    from raylance.planning.balance import Balance
    from raylance.planning.step_size import Budget
    from raylance.reports.page import report_run
    from raylance.reports.proving import RunProof, explain_run, prove_run
    from raylance.reports.watching import watch
    from raylance.samples.pack_tokens import PackTokens
    from raylance.samples.packs import Pack
    from raylance.samples.table import SampleTable
    from raylance.samples.windows import Windows
    from raylance.settings import Options
    from raylance.source.costs import TokensOf
    from raylance.source.namespace import NamespaceTable
    from raylance.source.provenance import Provenance
    from raylance.source.splits import FractionSplit, RangeSplit, ValueSplit
    from raylance.source.videos import Video
    from raylance.source.write_back import add_column, read_values, write_column, write_values

_MODULES = {
    "api.dataset": ("Dataset",),
    "api.opening": ("dataset",),
    "errors": (
        "BadRowError",
        "ConfigError",
        "CoverageError",
        "DatasetError",
        "HelperError",
        "PlacementError",
        "RaylanceError",
        "StateError",
    ),
    "decode.arrays": ("Pad",),
    "decode.clips": ("Clip",),
    "decode.crops": ("CenterCrop", "RandomResizedCrop", "map_boxes", "map_points"),
    "decode.decoder": ("BatchDecoder", "Decoder", "RaggedDecoder"),
    "decode.device_images": ("DeviceImage",),
    "decode.frames": ("FrameCrop",),
    "decode.images": ("Image", "ImageCrop"),
    "api.batches": ("Batches",),
    "api.loader": ("RankLoader",),
    "orders.shuffles": ("RowShuffle", "Sequential", "ShardShuffle", "WindowShuffle"),
    "api.mixing": ("mix",),
    "api.ray_data": ("from_ray_dataset",),
    "orders.buckets": ("Buckets",),
    "planning.balance": ("Balance",),
    "planning.step_size": ("Budget",),
    "samples.pack_tokens": ("PackTokens",),
    "samples.packs": ("Pack",),
    "batches.varlen": ("cu_seqlens",),
    "orders.order": ("Order",),
    "source.costs": ("TokensOf",),
    "source.namespace": ("NamespaceTable",),
    "orders.permutation": ("row_rng",),
    "orders.sampling": ("ClassBalanced", "Weighted"),
    "samples.table": ("SampleTable",),
    "samples.windows": ("Windows",),
    "settings": ("Options",),
    "source.provenance": ("Provenance",),
    "source.splits": ("FractionSplit", "RangeSplit", "ValueSplit"),
    "source.videos": ("Video",),
    "source.write_back": ("add_column", "read_values", "write_column", "write_values"),
    "integrations.data_config": ("DataConfig",),
    "integrations.fail_fast": ("FailFast",),
    "reports.page": ("report_run",),
    "reports.proving": ("RunProof", "explain_run", "prove_run"),
    "reports.watching": ("watch",),
    "observe.record": ("open_folder",),
    "integrations.checkpoint_files": ("newest_checkpoint",),
    "integrations.checkpoints": ("report", "restore"),
    "integrations.lineage": ("mlflow_dataset", "wandb_artifact"),
    "integrations.preemption": ("report_if_preempted",),
}
_SUBMODULES = ("audit", "lerobot", "testing", "torch_data", "torchft")
_OWNERS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BadRowError", "Balance", "BatchDecoder", "Batches", "Buckets", "Budget", "CenterCrop", "ClassBalanced", "Clip",
    "ConfigError", "CoverageError", "DataConfig", "Dataset", "DatasetError", "Decoder", "DeviceImage", "FailFast",
    "FractionSplit", "FrameCrop", "HelperError", "Image", "ImageCrop", "NamespaceTable", "Options", "Order", "Pack",
    "PackTokens", "Pad", "PlacementError", "Provenance", "RaggedDecoder", "RandomResizedCrop", "RangeSplit",
    "RankLoader", "RaylanceError", "RowShuffle", "RunProof", "SampleTable", "Sequential", "ShardShuffle",
    "StateError", "TokensOf", "ValueSplit", "Video", "Weighted", "WindowShuffle", "Windows", "add_column",
    "cu_seqlens", "dataset", "explain_run", "from_ray_dataset", "map_boxes", "map_points", "mix", "mlflow_dataset",
    "newest_checkpoint", "open_folder", "prove_run", "read_values", "report", "report_if_preempted", "report_run",
    "restore", "row_rng", "wandb_artifact", "watch", "write_column", "write_values",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"raylance.{name}")
    if name not in _OWNERS:
        raise AttributeError(f"module 'raylance' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"raylance.{_OWNERS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))])
