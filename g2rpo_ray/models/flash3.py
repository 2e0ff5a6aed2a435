"""FlashAttention-3 for Hopper cards, of the package fa3-fwd (``pip install "g2rpo-ray[flash3]"``).

Forward alone, without masks. Source: arXiv 2407.08608.
"""

import torch
from torch import Tensor


@torch.library.custom_op("g2rpo_ray::flash3", mutates_args=())
def flash3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of every head to all tokens: its sums are in one order, whatever the batch.

    Args:
        q, k, v: bfloat16 ``[B, tokens, heads, D]`` whose last axis is contiguous.

    Returns:
        ``[B, tokens, heads, D]``, contiguous.
    """
    # The package's own Python would wrap this in two more operators and an autograd function.
    out: Tensor = torch.ops.fa3_fwd.fwd(q, k, v, softmax_scale=q.shape[-1] ** -0.5, num_splits=1)[0]
    return out


@flash3.register_fake
def _flash3_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG001
    return q.new_empty(*q.shape[:-1], v.shape[-1])
