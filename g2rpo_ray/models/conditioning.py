"""What a FLUX transformer is conditioned on."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptEmbeds:
    """Embeddings of one prompt."""

    t5: Tensor
    """``[text tokens, joint_attention_dim]``, the model's dtype."""
    pooled: Tensor
    """``[pooled_projection_dim]``: CLIP's pooled embedding, the model's dtype."""

    def to(self, device: torch.device) -> "PromptEmbeds":
        return PromptEmbeds(self.t5.to(device), self.pooled.to(device))
