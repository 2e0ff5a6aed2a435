"""What a rollout's compiled blocks compute in kernels better than torch.compile's own; they have
no gradients.

On an H200 (720 x 720, batches of 8), torch.compile's kernels for the norm and rotary embedding of
queries and keys moved 1.2 TB/s of 4.8, and its GELU waited for tanh. Where no adapter is, GELU is
part of the product before it (``product_with_gelu``). Outside compiled code nothing changes: there
the blocks are diffusers' own.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from diffusers.models.activations import GELU
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from g2rpo_ray.models.adapted import products

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of every pair of numbers of a head: float32 ``[all tokens, head_dim / 2]``."""

PICTURE = ("to_q", "to_k", "to_v", "norm_q", "norm_k")
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
"""Layers of a stream, as diffusers' joint attention names them."""


def fuse_elementwise(transformer: Any, processors: dict[type, type]) -> None:
    """Prepare a transformer on a card for ``compile_blocks``; the weights' names stay.

    It must not be trained: the kernels have no backward pass.

    Args:
        processors: of attention, by the class of those that they take the place of.
    """
    for module in transformer.modules():
        chosen = getattr(module, "processor", None)
        if type(chosen) in processors and getattr(module, "norm_q", None) is not None:
            ours = processors[type(chosen)]()
            ours._attention_backend = getattr(chosen, "_attention_backend", None)
            module.set_processor(ours)
        elif isinstance(module, GELU) and module.approximate == "tanh":
            module.gelu = gelu
            if is_plain(module.proj):
                module.forward = MethodType(_gelu_forward, module)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a product and a bias alone, without adapter or weights in 8 bits."""
    return type(layer) is nn.Linear and layer.bias is not None


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


def _gelu_forward(self: Any, x: Tensor) -> Tensor:
    """In the place of that of diffusers' ``GELU``, a product and the function."""
    if torch.compiler.is_compiling():
        return product_with_gelu(x, self.proj.weight, self.proj.bias)
    answer: Tensor = type(self).forward(self, x)
    return answer


@torch.library.custom_op("g2rpo_ray::product_with_gelu", mutates_args=())
def product_with_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU's tanh approximation of ``x W^T + b``, of the sum in float32: it is rounded once.

    Args:
        x: ``[..., in]``, of the weight's dtype.
        weight: W, ``[out, in]``.
        bias: b, ``[out]``.

    Returns:
        ``[..., out]``.
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        y = torch._addmm_activation(bias, rows, weight.T, use_gelu=True)
    else:
        # There the same operator means GELU itself.
        y = nn.functional.gelu(torch.addmm(bias, rows, weight.T), approximate="tanh")
    return y.unflatten(0, x.shape[:-1])


@product_with_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("g2rpo_ray::product_of_parts", mutates_args=())
def product_of_parts(parts: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """``x W^T + b`` of an ``x`` whose channels lie in several tensors, which are not put together.

    A part's sum is rounded before the next one is added.

    Args:
        parts: ``[..., channels of the part]`` each, of the weight's dtype.
        weight: W, ``[out, channels of all parts]``.
        bias: b, ``[out]``.

    Returns:
        ``[..., out]``.
    """
    columns = weight.split([part.shape[-1] for part in parts], dim=1)
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    y = torch.addmm(bias, rows[0], columns[0].T)
    for part, column in zip(rows[1:], columns[1:], strict=True):
        y.addmm_(part, column.T)
    return y.unflatten(0, parts[0].shape[:-1])


@product_of_parts.register_fake
def _(parts: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG001
    return parts[0].new_empty(*parts[0].shape[:-1], len(weight))


def attended(
    attn: Any,
    streams: Sequence[tuple[Tensor, tuple[str, ...]]],
    rotary: Rotary | None,
    **dispatch: Any,
) -> list[Tensor]:
    """Joint attention before its last products, with one kernel for the norm, the rotary embedding
    and the place in the joint sequence of queries, and one for those of keys.

    Args:
        attn: diffusers' module.
        streams: in the order of the joint sequence, ``[B, tokens, C]`` each with ``PICTURE`` or
            ``TEXT``.
        rotary: of the joint sequence, if there is one.
        dispatch: to diffusers' ``dispatch_attention_fn``.

    Returns:
        ``[B, tokens, C]`` of each stream.
    """
    projected = [products([getattr(attn, n) for n in names[:3]], x) for x, names in streams]
    queries, keys, values = zip(*projected, strict=True)
    q, k = (
        norm_and_rotate(
            [part.contiguous() for part in parts],
            [getattr(attn, names[norm]).weight for _, names in streams],
            *(rotary or (None, None)),
            eps=attn.norm_q.eps,
        )
        for parts, norm in ((queries, 3), (keys, 4))
    )
    v = values[0] if len(values) == 1 else torch.cat(values, dim=1)
    v = v.unflatten(-1, q.shape[2:])
    joint = dispatch_attention_fn(q, k, v, **dispatch).flatten(2, 3)
    parts = joint.split([x.shape[1] for x, _ in streams], dim=1)
    return [part.contiguous() for part in parts]


@torch.library.custom_op("g2rpo_ray::norm_and_rotate", mutates_args=())
def norm_and_rotate(
    parts: list[Tensor], weights: list[Tensor], cos: Tensor | None, sin: Tensor | None, eps: float
) -> Tensor:
    """RMS norm of every head, then the rotary embedding, of sequences put after one another.

    Computed in float32 and rounded once.

    Args:
        parts: contiguous, ``[B, tokens of the part, heads * D]`` each.
        weights: of the norm, ``[D]`` for each part.
        cos: float32 ``[all tokens, D / 2]``, one for each pair of numbers; without it no rotation.
        sin: like ``cos``, of its strides too.
        eps: of the norm.

    Returns:
        ``[B, all tokens, heads, D]`` in the parts' dtype.
    """
    out = _joint(parts, weights, cos, sin, eps)
    batch, tokens, heads, head_dim = out.shape
    angles = (cos, sin, *cos.stride()) if cos is not None and sin is not None else (out, out, 0, 0)
    first = 0
    for x, weight in zip(parts, weights, strict=True):
        _norm_and_rotate_kernel[(batch * x.shape[1],)](
            x, weight, *angles, out, x.shape[1], first, tokens, eps,
            heads=heads, rows=triton.next_power_of_2(heads), head_dim=head_dim,
            rotate=cos is not None,
        )  # fmt: skip
        first += x.shape[1]
    return out


@norm_and_rotate.register_fake
def _joint(
    parts: list[Tensor],
    weights: list[Tensor],
    cos: Tensor | None,  # noqa: ARG001
    sin: Tensor | None,  # noqa: ARG001
    eps: float,  # noqa: ARG001
) -> Tensor:
    """An empty tensor of the answer's shape."""
    batch, _, channels = parts[0].shape
    head_dim = weights[0].shape[0]
    tokens = sum(part.shape[1] for part in parts)
    return parts[0].new_empty(batch, tokens, channels // head_dim, head_dim)


@triton.jit
def _norm_and_rotate_kernel(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, angle_row, angle_pair, out, tokens, first, all_tokens, eps,
    heads: tl.constexpr, rows: tl.constexpr, head_dim: tl.constexpr, rotate: tl.constexpr,
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
    if rotate:
        c = tl.load(cos + place * angle_row + pair * angle_pair)[None, :]
        s = tl.load(sin + place * angle_row + pair * angle_pair)[None, :]
        real, imaginary = tl.split(tl.reshape(values, (rows, head_dim // 2, 2)))
        rotated = tl.join(real * c - imaginary * s, imaginary * c + real * s)
        values = tl.reshape(rotated, (rows, head_dim))
    start = (sample * all_tokens + place) * heads * head_dim
    tl.store(out + start + offsets, values.to(out.dtype.element_ty), mask=inside)
