"""FLUX.1's blocks with the kernels of ``models/fused.py``."""

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
)
from torch import Tensor

from g2rpo_ray.models.fused import PICTURE, TEXT, FusedGelu, attended, fuse_elementwise


def fuse(transformer: FluxTransformer2DModel) -> None:
    """As ``fuse_elementwise``."""
    fuse_elementwise(transformer, {FluxAttnProcessor: FusedAttnProcessor})
    for module in transformer.modules():
        if isinstance(module, FluxSingleTransformerBlock):
            module.act_mlp = FusedGelu()


class FusedAttnProcessor(FluxAttnProcessor):
    """FLUX's attention by ``attended``."""

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling() or image_rotary_emb is None:
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        return self.fused(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )

    def fused(
        self,
        attn: FluxAttention,
        image: Tensor,
        text: Tensor | None,
        mask: Tensor | None,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of ``[B, image tokens, C]``, in a double block over ``text`` before it too."""
        cos, sin = rotary
        streams = [(image, PICTURE)] if text is None else [(text, TEXT), (image, PICTURE)]
        *texts, image = attended(
            attn, streams, (cos[:, ::2], sin[:, ::2]), attn_mask=mask,
            backend=self._attention_backend, parallel_config=self._parallel_config,
        )  # fmt: skip
        if not texts:
            return image
        return attn.to_out[0](image), attn.to_add_out(texts[0])
