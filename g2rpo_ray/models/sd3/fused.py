"""Stable Diffusion 3.5's blocks with the kernels of ``models/fused.py``."""

from typing import Any

import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor

from g2rpo_ray.models.fused import PICTURE, TEXT, attended, fuse_elementwise


def fuse(transformer: Any) -> None:
    """As ``fuse_elementwise``."""
    fuse_elementwise(transformer, {JointAttnProcessor2_0: FusedAttnProcessor})


class FusedAttnProcessor(JointAttnProcessor2_0):
    """Joint attention, and the second one of some blocks, by ``attended``."""

    _attention_backend = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling() or attention_mask is not None:
            answer: Tensor | tuple[Tensor, Tensor] = super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs
            )
            return answer
        return self.fused(attn, hidden_states, encoder_hidden_states)

    def fused(
        self, attn: Any, image: Tensor, text: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of ``[B, image tokens, C]``, with ``text`` after it if there is one."""
        streams = [(image, PICTURE)] if text is None else [(image, PICTURE), (text, TEXT)]
        image, *texts = attended(attn, streams, None, backend=self._attention_backend)
        image = attn.to_out[0](image)
        if not texts:
            return image
        return image, texts[0] if attn.context_pre_only else attn.to_add_out(texts[0])
