"""Qwen-Image's blocks with the kernels of ``models/fused.py``."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch import Tensor

from g2rpo_ray.models.fused import PICTURE, TEXT, attended, fuse_elementwise


def fuse(transformer: Any) -> None:
    """As ``fuse_elementwise``. torch.compile has no code for complex numbers: the rotary embedding
    is given to the blocks as pairs of real ones."""
    fuse_elementwise(transformer, {QwenDoubleStreamAttnProcessor2_0: FusedAttnProcessor})
    transformer.pos_embed.register_forward_hook(
        lambda _module, _inputs, angles: tuple(torch.view_as_real(a) for a in angles)
    )


class FusedAttnProcessor(QwenDoubleStreamAttnProcessor2_0):
    """Joint attention by ``attended``."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        masked = encoder_hidden_states_mask is not None
        if not torch.compiler.is_compiling() or masked or image_rotary_emb is None:
            angles = image_rotary_emb and tuple(torch.view_as_complex(a) for a in image_rotary_emb)
            answer: Tensor | tuple[Tensor, Tensor] = super().__call__(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask,
                attention_mask, angles,
            )  # fmt: skip
            return answer
        return self.fused(attn, hidden_states, encoder_hidden_states, image_rotary_emb)

    def fused(
        self, attn: Any, image: Tensor, text: Tensor | None, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Attention of ``[B, image tokens, C]`` with the text before it.

        Args:
            rotary: float32 ``[tokens, head_dim / 2, 2]`` of image and text: cosine and sine.
        """
        assert text is not None, "its blocks have both streams"
        cos, sin = torch.cat([rotary[1], rotary[0]]).unbind(-1)
        text, image = attended(
            attn, [(text, TEXT), (image, PICTURE)], (cos, sin), backend=self._attention_backend
        )
        return attn.to_out[0](image), attn.to_add_out(text)
