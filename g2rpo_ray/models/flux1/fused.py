"""What a rollout's compiled blocks compute in kernels better than torch.compile's own; they have
no gradients.

On an H200 (720 x 720, batches of 8), torch.compile's kernels for the norm and rotary embedding of
queries and keys moved 1.2 TB/s of 4.8, and its GELU waited for tanh. Outside compiled code nothing
changes: there the blocks are diffusers' own.
"""

import torch
import triton
import triton.language as tl
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import Tensor, nn


def fuse_elementwise(transformer: FluxTransformer2DModel) -> None:
    """Prepare a transformer on a card for ``compile_blocks``; the weights' names stay.

    It must not be trained: the kernels have no backward pass.
    """
    for module in transformer.modules():
        if isinstance(module, FluxAttention):
            chosen = module.processor
            module.set_processor(FusedAttnProcessor())
            module.processor._attention_backend = chosen._attention_backend
        elif isinstance(module, FluxTransformerBlock):
            for feed_forward in (module.ff, module.ff_context):
                feed_forward.net[0].gelu = gelu
        elif isinstance(module, FluxSingleTransformerBlock):
            module.act_mlp = FusedGelu()


def gelu(x: Tensor) -> Tensor:
    """GELU's tanh approximation as ``x * sigmoid(2 u)``, the same function: exponentials are
    cheaper than tanh on a card."""
    if not torch.compiler.is_compiling():
        return nn.functional.gelu(x, approximate="tanh")
    wide = x.float()
    return (wide * torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide**3))).to(x.dtype)


class FusedGelu(nn.Module):
    """:func:`gelu` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class FusedAttnProcessor(FluxAttnProcessor):
    """FLUX's attention with one kernel for the norm, the rotary embedding and the place in the
    joint sequence of queries, and one for those of keys."""

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
        q, k, v = attn.to_q(image), attn.to_k(image), attn.to_v(image)
        parts_q, parts_k = [(q, attn.norm_q)], [(k, attn.norm_k)]
        if text is not None:
            parts_q.insert(0, (attn.add_q_proj(text), attn.norm_added_q))
            parts_k.insert(0, (attn.add_k_proj(text), attn.norm_added_k))
            v = torch.cat([attn.add_v_proj(text), v], dim=1)
        joint = dispatch_attention_fn(
            _norm_and_rotate(parts_q, rotary),
            _norm_and_rotate(parts_k, rotary),
            v.unflatten(-1, (-1, attn.head_dim)),
            attn_mask=mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2, 3)
        if text is None:
            return joint
        text_out, image_out = joint[:, : text.shape[1]], joint[:, text.shape[1] :]
        return attn.to_out[0](image_out.contiguous()), attn.to_add_out(text_out.contiguous())


def _norm_and_rotate(
    parts: list[tuple[Tensor, nn.RMSNorm]], rotary: tuple[Tensor, Tensor]
) -> Tensor:
    return norm_and_rotate(
        [x.contiguous() for x, _ in parts],
        [norm.weight for _, norm in parts],
        *rotary,
        eps=parts[0][1].eps,
    )


@torch.library.custom_op("g2rpo_ray::norm_and_rotate", mutates_args=())
def norm_and_rotate(
    parts: list[Tensor], weights: list[Tensor], cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """RMS norm of every head, then FLUX's rotary embedding, of sequences put after one another.

    Computed in float32 and rounded once.

    Args:
        parts: contiguous, ``[B, tokens of the part, heads * D]`` each.
        weights: of the norm, ``[D]`` for each part.
        cos: float32 ``[all tokens, D]``; equal for both numbers of a pair.
        sin: like ``cos``.
        eps: of the norm.

    Returns:
        ``[B, all tokens, heads, D]`` in the parts' dtype.
    """
    out = _joint(parts, weights, cos, sin, eps)
    batch, tokens, heads, head_dim = out.shape
    first = 0
    for x, weight in zip(parts, weights, strict=True):
        _norm_and_rotate_kernel[(batch * x.shape[1],)](
            x, weight, cos, sin, out, x.shape[1], first, tokens, eps,
            heads=heads, rows=triton.next_power_of_2(heads), head_dim=head_dim,
        )  # fmt: skip
        first += x.shape[1]
    return out


@norm_and_rotate.register_fake
def _joint(
    parts: list[Tensor],
    weights: list[Tensor],  # noqa: ARG001
    cos: Tensor,
    sin: Tensor,  # noqa: ARG001
    eps: float,  # noqa: ARG001
) -> Tensor:
    """An empty tensor of the answer's shape."""
    batch, _, channels = parts[0].shape
    tokens, head_dim = cos.shape
    return parts[0].new_empty(batch, tokens, channels // head_dim, head_dim)


@triton.jit
def _norm_and_rotate_kernel(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, out, tokens, first, all_tokens, eps,
    heads: tl.constexpr, rows: tl.constexpr, head_dim: tl.constexpr,
):  # fmt: skip
    """One program takes all heads of a token: they share its angles."""
    program = tl.program_id(0).to(tl.int64)
    sample, place = program // tokens, first + program % tokens
    row, column, pair = tl.arange(0, rows), tl.arange(0, head_dim), tl.arange(0, head_dim // 2)
    offsets, inside = row[:, None] * head_dim + column[None, :], row[:, None] < heads
    values = tl.load(x + program * heads * head_dim + offsets, mask=inside, other=0.0).to(
        tl.float32
    )
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / head_dim + eps)
    values = values * scale[:, None] * tl.load(weight + column).to(tl.float32)[None, :]
    c = tl.load(cos + place * head_dim + 2 * pair)[None, :]
    s = tl.load(sin + place * head_dim + 2 * pair)[None, :]
    real, imaginary = tl.split(tl.reshape(values, (rows, head_dim // 2, 2)))
    rotated = tl.join(real * c - imaginary * s, imaginary * c + real * s)
    start = (sample * all_tokens + place) * heads * head_dim
    rounded = tl.reshape(rotated, (rows, head_dim)).to(out.dtype.element_ty)
    tl.store(out + start + offsets, rounded, mask=inside)
