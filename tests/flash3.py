"""A stand-in for the package fa3-fwd: its operator, of its schema, computed by SDPA on the CPU."""

import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0., "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
"""As the operator of version 0.0.3 tells it."""


TAKEN: list[torch.Size] = []
"""Shapes of the queries that came."""


def fwd(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like the kernel: heads behind tokens, answers of bfloat16, a contiguous last axis."""
    names = [argument.name for argument in torch.ops.fa3_fwd.fwd.default._schema.arguments]
    named = dict(zip(names, given, strict=False))
    parts = [named[name] for name in "qkv"]
    assert all(x.stride(-1) == 1 for x in parts)
    assert {x.dtype for x in parts} in ({torch.bfloat16}, {torch.float8_e4m3fn})
    assert named["num_splits"] == 1, "sums in an order that depends on the batch"
    scales = [named[f"{name}_descale"] for name in "qkv"]
    q, k, v = (
        (x.float() * (1.0 if scale is None else scale[:, None, :, None])).transpose(1, 2)
        for x, scale in zip(parts, scales, strict=True)
    )
    TAKEN.append(parts[0].shape)
    out = scaled_dot_product_attention(q, k, v, scale=named["softmax_scale"]).transpose(1, 2)
    empty = torch.empty(0)
    return out.to(torch.bfloat16).contiguous(), empty, empty, empty


# Where the package is installed its operator gets the CPU's part: no name is defined twice.
with suppress(ImportError, OSError):
    import fa3_fwd_interface  # noqa: F401
LIBRARY = torch.library.Library("fa3_fwd", "FRAGMENT")
if not hasattr(torch.ops.fa3_fwd, "fwd"):
    LIBRARY.define(SCHEMA)
LIBRARY.impl("fwd", fwd, "CPU")


@pytest.fixture
def flash3_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the package works, and nothing was computed yet."""
    TAKEN.clear()
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", ModuleType("fa3_fwd_interface"))
