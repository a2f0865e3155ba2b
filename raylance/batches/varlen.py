"""The arguments of attention over lengths ("varlen"), for batches of packed documents."""

from typing import Any

import numpy as np
import torch

from raylance.errors import ConfigError


def cu_seqlens(segment_ids: Any) -> tuple[Any, int]:
    """Returns the arguments of attention over lengths, such as `flash_attn_varlen_func`, for a batch of `Pack`: tokens
    attend to those of the same piece only. Padding is a piece of its own at the end of each sequence.

    Args:
        segment_ids: The batch's `segment_ids`: a torch tensor or an array, (n, length).

    Returns:
        The ends of the pieces in the n x length tokens of the batch, with 0 before them: int32, (pieces + 1,), a tensor
        on the same device, or an array; and the number of tokens of the longest piece.

    Raises:
        ConfigError: If it is neither a tensor nor an array of two axes, or does not hold integers.
    """
    if not isinstance(segment_ids, np.ndarray | torch.Tensor) or segment_ids.ndim != 2:
        raise ConfigError(
            f"cu_seqlens() of {type(segment_ids).__name__}: give the segment_ids of a batch, a tensor or an array of "
            "shape (n, length)."
        )
    is_whole = segment_ids.dtype.kind in "iu" if isinstance(segment_ids, np.ndarray) else _is_whole(segment_ids.dtype)
    if not is_whole:
        raise ConfigError(f"cu_seqlens() of {segment_ids.dtype}: give the segment_ids of a batch, which are integers.")
    count, length = segment_ids.shape
    ids = segment_ids if isinstance(segment_ids, np.ndarray) else segment_ids.cpu().numpy()
    begins = np.ones((count, length), dtype=np.bool_)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = np.append(np.flatnonzero(begins.reshape(-1)), count * length).astype(np.int32)
    longest = int(np.diff(ends).max(initial=0))
    if isinstance(segment_ids, np.ndarray):
        return ends, longest
    return torch.from_numpy(ends).to(segment_ids.device), longest


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
