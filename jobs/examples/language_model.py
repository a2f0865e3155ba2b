"""Pretraining of a small GPT on packed documents: no token attends to another document, and padding has no labels.

`Pack` joins documents to sequences, in each epoch in another way, and gives labels, positions and segments. The mask of
the attention follows from the segments; on a GPU, `raylance.text.cu_seqlens(segment_ids)` gives the arguments of
`flash_attn_varlen_func` in its place. A run that is killed continues with the next sequence, on any number of ranks.

Cost: a document that does not fit into the rest of a sequence is cut ("stream") or moved ("whole"). If documents are
few and long, "stream" has less padding; if answers must see their whole prompts, "whole" is right.

    python -m jobs.examples.made_data documents documents.lance
    python -m jobs.examples.language_model --data documents.lance
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

import raylance
from jobs.common import locate
from jobs.examples import common

LENGTH, WORDS, WIDTH = 64, 64, 32
PACK = raylance.Pack("tokens", length=LENGTH, policy="whole", eos_id=0)


class TinyGPT(torch.nn.Module):
    """One block of attention and its head."""

    def __init__(self) -> None:
        """Has the same weights wherever it is made."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
            self.inputs, self.outputs = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, places: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Takes (n, length) each; returns (n, length, words)."""
        hidden = self.words(ids) + self.places(places)
        mask = (segments[:, :, None] == segments[:, None, :]).tril()
        query, key, value = self.inputs(hidden).chunk(3, dim=-1)
        seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(hidden + self.outputs(seen))


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross-entropy of the next token, over the tokens that have one in their document."""
    logits = model(batch["input_ids"], batch["position_ids"], batch["segment_ids"])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten().long())


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains; see `common.train`."""
    return common.train(config, model=TinyGPT(), loss_fn=loss_of)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    data = raylance.dataset(locate(args.data), samples=PACK, filter="split = 'train'", remainder="ragged")
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
