"""Texts with images of any size, for a model of the Qwen2-VL family: two costs, and the same work for every rank.

Each row has token ids and a list of 0 to 6 images. `raylance.Patches` decodes them at their own sizes, as patches, in
the decode actors; the ids have a placeholder for each token that an image becomes, as the model's processor writes
them. A row costs tokens in the language model and patches in the encoder: no step exceeds either limit of the budget,
and `Balance` swaps rows between ranks until both costs are about equal on all.

Cost: the headers of all images are read once for a version; name `height=` and `width=` columns, and they are not. A
rank may have no image in a step, so DDP must look for parameters without gradients.

    python -m jobs.examples.made_data pages pages.lance
    python -m jobs.examples.images_and_text --data pages.lance
"""

import sys
from typing import Any

import ray.train
import torch

import raylance
from jobs.common import bringing, locate
from jobs.examples import common
from jobs.examples.made_data import IMAGE, PATCHES, WORDS

with bringing("raylance[examples]", __name__):
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

BUDGET = raylance.Budget({"tokens": 512, "patches": 1_024})
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP, as the processor's


def build_model() -> Qwen2VLForConditionalGeneration:
    """A model of transformers' own class, with few parameters and random weights, the same wherever it is made."""
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4_096}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}}
    text |= {"bos_token_id": None, "eos_token_id": None}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=WORDS + 2)
        )


def normalised(patches: torch.Tensor) -> torch.Tensor:
    """What the model takes of uint8 patches (p, 1176): float32, by channel."""
    values = patches.view(len(patches), 3, -1).float() / 255
    mean, std = (torch.tensor(each, device=patches.device)[None, :, None] for each in (MEAN, STD))
    return ((values - mean) / std).flatten(1)


def loss_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The sum of the cross-entropies of a batch's words; images are not learnt."""
    ids, lengths = batch["input_ids"].long(), batch["input_ids_length"]
    is_token = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    images: dict[str, Any] = {}
    if len(batch["images_grid"]):
        images = {"pixel_values": normalised(batch["images"]), "image_grid_thw": batch["images_grid"].long()}
    kinds = (ids == IMAGE).int()
    logits = model(input_ids=ids, attention_mask=is_token.long(), mm_token_type_ids=kinds, **images).logits
    labels = torch.where(is_token & (ids != IMAGE), ids, -100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains, and reports every few steps."""
    loader = ray.train.get_dataset_shard("train")
    batches = loader.prepare(budget=BUDGET, pad_lists={"input_ids": raylance.Pad(0)})
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if (saved := raylance.restore(loader)) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = ray.train.torch.prepare_model(model, parallel_strategy_kwargs={"find_unused_parameters": True})
    world, metrics = ray.train.get_context().get_world_size(), dict[str, float]()
    for epoch in range(loader.epoch, config["epochs"]):
        for step, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = loss_of(parallel, batch) * (world / batch["_step_cost"]["tokens"])  # DDP divides by the world
            loss.backward()
            optimizer.step()
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch > epoch:
                metrics = {"loss": loss.item(), "epoch": loader.epoch}
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                raylance.report(metrics, loader, state=state)
    return metrics


def open_data(uri: str, **changes: Any) -> raylance.Dataset:
    """The rows to train on."""
    patches = raylance.Patches("images", **PATCHES)
    arguments: dict[str, Any] = {
        "columns": ["input_ids", patches],
        "filter": "split = 'train'",
        "cost": {"tokens": raylance.TokensOf("input_ids"), "patches": patches},
        "balance": raylance.Balance(most_moved=0.3),
        "remainder": "ragged",
    }
    return raylance.dataset(locate(uri), **arguments | changes)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    data = open_data(args.data)
    print(data.plan(world_size=max(1, args.num_workers), budget=BUDGET))
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
