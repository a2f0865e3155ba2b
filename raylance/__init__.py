"""Ray Train fed from Lance datasets.

Open
    `dataset` opens a Lance dataset, `mix` several with weights; both return a `Dataset`. `FractionSplit`, `RangeSplit`
    and `ValueSplit` are parts of one.
Columns
    `Image`, `Video` and `Clip` decode columns; `RandomResizedCrop` and `CenterCrop` crop them. `Patches` are images at
    their own sizes, for models of images and text. A `Decoder` of your own
    decodes a value, a `RaggedDecoder` one of any length, a `BatchDecoder` many at once. `Renamed` is a column under
    another name. `Pad` pads lists.
Samples
    `Windows` makes a sample of rows around a row, `Pack` packs documents of tokens, a `SampleTable` takes any rows.
Orders
    `WindowShuffle`, `ShardShuffle`, `RowShuffle`, `Sequential`, `Buckets`, `Weighted`, `ClassBalanced`, or an `Order`
    of your own. `TokensOf` is what a row costs, a `Budget` what a step may cost; `Balance` divides steps by cost.
Iterate
    `DataConfig` gives the ranks of Ray Train their `RankLoader`, whose methods return `Batches`. `Options` are its
    settings.
Save and resume
    `report` and `restore`; `runs.report_if_preempted` where nodes are taken away; `FailFast` where no restart helps.
See
    `watch` shows a run, `explain_run` says what limits it, `report_run` draws it.
Prove
    `prove_run` says which rows were handed out, and how often.
Errors
    `RaylanceError` is the base; `BadRowError` is a row that cannot be decoded, `StateError` a state of other data.

Two crops of an image: `Image(…, views=2)`. Action chunks: `Windows`. Prompts that are not learnt:
`Pack(…, label_mask=…)`. Steps of a number of tokens: `Budget`, with `cost=TokensOf(…)`. A loop without Ray:
`dataset(…).loader()`.
Ask for one name: `help(raylance.dataset)`, `help(raylance.Image)`.

Modules: `raylance.writing` (columns, and datasets of Ray Data), `raylance.images` (on GPUs; crops, boxes, points),
`raylance.text`, `raylance.runs`, `raylance.tracking` (MLflow, W&B), `raylance.namespaces`, `raylance.lerobot`,
`raylance.torch_data`, `raylance.torchft`, `raylance.audit`, `raylance.testing`, `raylance.errors`.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from raylance._version import __version__ as __version__

if TYPE_CHECKING:
    from raylance import audit as audit
    from raylance import errors as errors
    from raylance import images as images
    from raylance import lerobot as lerobot
    from raylance import namespaces as namespaces
    from raylance import runs as runs
    from raylance import testing as testing
    from raylance import text as text
    from raylance import torch_data as torch_data
    from raylance import torchft as torchft
    from raylance import tracking as tracking
    from raylance import writing as writing
    from raylance.api.batches import Batches
    from raylance.api.dataset import Dataset
    from raylance.api.loader import RankLoader
    from raylance.api.mixing import mix
    from raylance.api.opening import dataset
    from raylance.decode.arrays import Pad
    from raylance.decode.clips import Clip
    from raylance.decode.crops import CenterCrop, RandomResizedCrop
    from raylance.decode.decoder import BatchDecoder, Decoder, RaggedDecoder
    from raylance.decode.images import Image
    from raylance.decode.patches import Patches
    from raylance.errors import BadRowError, RaylanceError, StateError
    from raylance.integrations.checkpoints import report, restore
    from raylance.integrations.data_config import DataConfig
    from raylance.integrations.fail_fast import FailFast
    from raylance.orders.buckets import Buckets
    from raylance.orders.order import Order
    from raylance.orders.sampling import ClassBalanced, Weighted
    from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle
    from raylance.planning.balance import Balance
    from raylance.planning.step_size import Budget
    from raylance.reports.page import report_run
    from raylance.reports.proving import explain_run, prove_run
    from raylance.reports.watching import watch
    from raylance.samples.packs import Pack
    from raylance.samples.table import SampleTable
    from raylance.samples.windows import Windows
    from raylance.settings import Options
    from raylance.source.costs import TokensOf
    from raylance.source.derived import Renamed
    from raylance.source.splits import FractionSplit, RangeSplit, ValueSplit
    from raylance.source.videos import Video

_MODULES = {
    "api.dataset": ("Dataset",),
    "api.opening": ("dataset",),
    "errors": ("BadRowError", "RaylanceError", "StateError"),
    "decode.arrays": ("Pad",),
    "decode.clips": ("Clip",),
    "decode.crops": ("CenterCrop", "RandomResizedCrop"),
    "decode.decoder": ("BatchDecoder", "Decoder", "RaggedDecoder"),
    "decode.images": ("Image",),
    "decode.patches": ("Patches",),
    "api.batches": ("Batches",),
    "api.loader": ("RankLoader",),
    "orders.shuffles": ("RowShuffle", "Sequential", "ShardShuffle", "WindowShuffle"),
    "api.mixing": ("mix",),
    "orders.buckets": ("Buckets",),
    "planning.balance": ("Balance",),
    "planning.step_size": ("Budget",),
    "samples.packs": ("Pack",),
    "orders.order": ("Order",),
    "source.costs": ("TokensOf",),
    "orders.sampling": ("ClassBalanced", "Weighted"),
    "samples.table": ("SampleTable",),
    "samples.windows": ("Windows",),
    "settings": ("Options",),
    "source.derived": ("Renamed",),
    "source.splits": ("FractionSplit", "RangeSplit", "ValueSplit"),
    "source.videos": ("Video",),
    "integrations.data_config": ("DataConfig",),
    "integrations.fail_fast": ("FailFast",),
    "reports.page": ("report_run",),
    "reports.proving": ("explain_run", "prove_run"),
    "reports.watching": ("watch",),
    "integrations.checkpoints": ("report", "restore"),
}
_SUBMODULES = (
    "audit", "errors", "images", "lerobot", "namespaces", "runs", "testing", "text", "torch_data", "torchft",
    "tracking", "writing",
)  # fmt: skip
_OWNERS = {name: module for module, names in _MODULES.items() for name in names}
_MOVED = {  # names of 0.12, and where they are now
    "writing": ("Provenance", "add_column", "from_ray_dataset", "read_values", "write_column", "write_values"),
    "tracking": ("mlflow_dataset", "wandb_artifact"),
    "images": ("DeviceImage", "FrameCrop", "ImageCrop", "map_boxes", "map_points"),
    "text": ("cu_seqlens",),
    "runs": ("RunProof", "newest_checkpoint", "open_folder", "report_if_preempted"),
    "namespaces": ("NamespaceTable",),
    "errors": ("ConfigError", "CoverageError", "DatasetError", "HelperError", "PlacementError"),
    "orders.permutation": ("row_rng",),
    "samples.pack_tokens": ("PackTokens",),
}
_HOMES = {name: module for module, names in _MOVED.items() for name in names}

__all__ = [
    "BadRowError", "Balance", "BatchDecoder", "Batches", "Buckets", "Budget", "CenterCrop", "ClassBalanced", "Clip",
    "DataConfig", "Dataset", "Decoder", "FailFast", "FractionSplit", "Image", "Options", "Order", "Pack", "Pad",
    "Patches", "RaggedDecoder", "RandomResizedCrop", "RangeSplit", "RankLoader", "RaylanceError", "Renamed",
    "RowShuffle", "SampleTable", "Sequential", "ShardShuffle", "StateError", "TokensOf", "ValueSplit", "Video",
    "Weighted", "WindowShuffle", "Windows", "dataset", "explain_run", "mix", "prove_run", "report", "report_run",
    "restore", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"raylance.{name}")
    if name in _HOMES:
        return _older(name)
    if name not in _OWNERS:
        raise AttributeError(f"module 'raylance' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"raylance.{_OWNERS[name]}"), name)
    globals()[name] = value
    return value


def _older(name: str) -> Any:
    """Returns what a name of 0.12 means, with a warning."""
    home = f"raylance.{_HOMES[name]}"
    new = "raylance.Pack(…, shuffle=False, labels=None)" if name == "PackTokens" else f"{home}.{name}"
    warnings.warn(f"raylance.{name} goes in 0.14: write {new}.", FutureWarning, stacklevel=3)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))])
