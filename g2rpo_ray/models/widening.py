"""Weights in 8 bits widened on a card, in one kernel.

PyTorch takes two, one to convert and one to scale; this one reads a byte a weight and writes the
wide number, by whole numbers alone, so that it runs on cards without float8 products too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def widen(bits: Tensor, scale: Tensor) -> Tensor:
    """As ``frozen_float8.widened``, to the bit."""
    rows, columns = bits.shape
    out = torch.empty(rows, columns, dtype=scale.dtype, device=bits.device)
    _widen_kernel[(rows, triton.cdiv(columns, BLOCK))](bits, scale, out, columns, block=BLOCK)
    return out


@triton.jit
def _widen_kernel(  # type: ignore[no-untyped-def]
    bits, scale, out, columns, block: tl.constexpr,
):  # fmt: skip
    """One program takes a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    number = tl.load(bits + row * columns + column, mask=inside, other=0).to(tl.int32)
    exponent, mantissa = (number >> 3) & 15, number & 7
    # float8 e4m3 has the exponent's bias 7, float32 127; without an exponent a number is m / 512.
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    # The sign as a bit: Triton's minus makes 0 of 0.
    signed = (size.to(tl.int32, bitcast=True) | ((number & 128) << 24)).to(tl.float32, bitcast=True)
    value = signed * tl.load(scale + row).to(tl.float32)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)
