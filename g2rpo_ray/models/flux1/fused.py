"""FLUX.1's blocks with the kernels of ``models/fused.py``."""

from types import MethodType
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
)
from torch import Tensor

from g2rpo_ray.models.fused import (
    PICTURE,
    TEXT,
    FusedGelu,
    attended,
    fuse_elementwise,
    is_plain,
    product_of_parts,
    product_with_gelu,
)


def fuse(transformer: FluxTransformer2DModel) -> None:
    """As ``fuse_elementwise``."""
    fuse_elementwise(transformer, {FluxAttnProcessor: FusedAttnProcessor})
    for module in transformer.modules():
        if isinstance(module, FluxSingleTransformerBlock):
            module.act_mlp = FusedGelu()
            if is_plain(module.proj_mlp) and is_plain(module.proj_out):
                module.forward = MethodType(_single_block, module)


def _single_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """In the place of diffusers', whose last product reads attention and feed-forward from one
    tensor: to put them there costs the card as much as GELU."""
    if not torch.compiler.is_compiling():
        answer: tuple[Tensor, Tensor] = type(self).forward(
            self,
            hidden_states,
            encoder_hidden_states,
            temb,
            image_rotary_emb,
            joint_attention_kwargs,
        )
        return answer
    x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    normed, gate = self.norm(x, emb=temb)
    attended = self.attn(
        hidden_states=normed, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {})
    )
    wide = product_with_gelu(normed, self.proj_mlp.weight, self.proj_mlp.bias)
    both = product_of_parts([attended, wide], self.proj_out.weight, self.proj_out.bias)
    x = x + gate.unsqueeze(1) * both
    text_tokens = encoder_hidden_states.shape[1]
    return x[:, :text_tokens], x[:, text_tokens:]


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
