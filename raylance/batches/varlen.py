"""The arguments of attention over lengths ("varlen"), for batches of packed documents."""

from typing import Any

import numpy as np
import torch


def cu_seqlens(segment_ids: Any) -> tuple[Any, int]:
    """Returns the arguments of attention over lengths, such as `flash_attn_varlen_func`, for a batch of `Pack`: tokens
    attend to those of the same piece only. Padding is a piece of its own at the end of each sequence.

    Args:
        segment_ids: The batch's `segment_ids`: a torch tensor or an array, (n, length).

    Returns:
        The ends of the pieces in the n x length tokens of the batch, with 0 before them: int32, (pieces + 1,), a tensor
        on the same device, or an array; and the number of tokens of the longest piece.
    """
    count, length = segment_ids.shape
    is_tensor = not isinstance(segment_ids, np.ndarray)
    ids = segment_ids.cpu().numpy() if is_tensor else segment_ids
    begins = np.ones((count, length), dtype=np.bool_)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = np.append(np.flatnonzero(begins.reshape(-1)), count * length).astype(np.int32)
    longest = int(np.diff(ends).max(initial=0))
    if not is_tensor:
        return ends, longest
    return torch.from_numpy(ends).to(segment_ids.device), longest
