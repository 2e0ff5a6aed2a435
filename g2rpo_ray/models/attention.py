"""How a rollout's attention is computed: by PyTorch's kernels, FlashAttention-3, or diffusers'."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config
from g2rpo_ray.config.rollout import FLASH3

SDPA_KERNELS = ("cudnn", "flash", "efficient", "math")
FLASH3_PACKAGE = "fa3_fwd_interface"
"""Module of the package fa3-fwd."""
FLASH3_CAPABILITY = (9, 0)
FLASH3_LARGEST_HEAD = 256
FLASH3_INSTALL = (
    "pip install 'g2rpo-ray[flash3]' where the workers run (Linux on x86-64, PyTorch for CUDA 13)"
)


class AttentionBackendError(InputError):
    """The attention backend is unknown, not installed here, or not for this card or network."""


def choose_attention(transformer: Any, backend: str) -> None:
    """Compute attention by ``backend`` from now on; before anything is compiled.

    Args:
        backend: a kernel of PyTorch's SDPA, for the whole process: ``cudnn`` (fastest of them on
            an H100: 590 TFLOP/s, flash 340), ``flash``, ``efficient``, ``math``; ``flash3``, and
            cuDNN for what it does not take; or a backend of diffusers' own for this network, such
            as ``sage`` or ``_flash_3``.

    Raises:
        AttentionBackendError: the backend is unknown, a package that it needs is missing, or it
            has no code for this card or the network's heads.
    """
    # PyTorch's cache of compiled code does not ask which kernel of SDPA was chosen.
    torch.compiler.config.cache_key_tag = f"attention {backend}"
    if backend in SDPA_KERNELS:
        _choose_sdpa(backend)
    elif backend == FLASH3:
        _load_flash3(transformer.device)
        _choose_sdpa("cudnn")
        route_to_flash3(transformer)
    else:
        try:
            transformer.set_attention_backend(backend)
        except (ValueError, ImportError, RuntimeError) as error:
            raise AttentionBackendError(
                f"rollout.attention={backend!r}: {error}; {', '.join(SDPA_KERNELS)} need no package"
            ) from error


def check_attention(config: Config) -> None:
    """Whether the package that ``rollout.attention`` needs is here, before any role starts.

    Raises:
        AttentionBackendError: it is not.
    """
    if config.rollout.attention == FLASH3 and find_spec(FLASH3_PACKAGE) is None:
        raise AttentionBackendError(
            f"rollout.attention={FLASH3!r}: the package fa3-fwd is not installed here; "
            f"{FLASH3_INSTALL}, or leave rollout.attention out (cudnn)"
        )


def _choose_sdpa(kernel: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    torch.backends.cuda.enable_flash_sdp(kernel == "flash")
    # One that takes every input stays on for what the chosen one does not take.
    torch.backends.cuda.enable_mem_efficient_sdp(kernel != "math")
    torch.backends.cuda.enable_math_sdp(True)


def _load_flash3(device: torch.device) -> None:
    """Its operator becomes known."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != FLASH3_CAPABILITY:
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise AttentionBackendError(
            f"rollout.attention={FLASH3!r}: it is for Hopper cards (H100, H200: compute capability "
            f"9.0), and this worker computes on {found}; leave it out, or choose other cards by "
            "rollout.label_selector"
        )
    try:
        import fa3_fwd_interface  # noqa: F401
    except (ImportError, OSError) as error:
        raise AttentionBackendError(
            f"rollout.attention={FLASH3!r}: {error}; {FLASH3_INSTALL}, or leave it out (cudnn)"
        ) from error


def route_to_flash3(transformer: Any) -> None:
    """Let a network's attention go to ``flash3``, wherever diffusers dispatches it.

    Raises:
        AttentionBackendError: heads are of a size that the kernel does not have.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    # diffusers' own name for it asks for another package, which has a backward pass as well.
    _AttentionBackendRegistry.register(AttentionBackendName._FLASH_3)(_attention)
    for name, module in transformer.named_modules():
        if (processor := getattr(module, "processor", None)) is None:
            continue
        size = getattr(module, "head_dim", None) or module.inner_dim // module.heads
        if size % 8 or size > FLASH3_LARGEST_HEAD:
            raise AttentionBackendError(
                f"rollout.attention={FLASH3!r}: {name} of the transformer has heads of {size} "
                f"numbers; it takes multiples of 8 up to {FLASH3_LARGEST_HEAD}; leave it out "
                "(cudnn)"
            )
        processor._attention_backend = AttentionBackendName._FLASH_3


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As diffusers calls a backend, ``[B, tokens, heads, D]``: by ``flash3`` where it can and is
    faster, else by SDPA."""
    plain = attn_mask is None and scale is None and not (dropout_p or is_causal or enable_gqa)
    # H200, 48 samples of 24 heads of 64: 1024 tokens fill cuDNN's tiles and take it 0.73 ms (flash3
    # 0.84); 1229 tokens take it 1.23 (1.10).
    small_in_full_tiles = query.shape[3] == 64 and query.shape[1] % 128 == 0
    if plain and not small_in_full_tiles:
        return flash3(query, key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    return out.transpose(1, 2)


@torch.library.custom_op("g2rpo_ray::flash3", mutates_args=())
def flash3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-3's forward pass (arXiv 2407.08608) by the package fa3-fwd.

    Sums are in one order, whatever the batch. It has no gradients.

    Args:
        q: bfloat16 ``[B, tokens, heads, D]``, the last axis contiguous.
        k: like ``q``.
        v: like ``q``.

    Returns:
        ``[B, tokens, heads, D]``, contiguous.
    """
    # The package's own Python would wrap this in another operator and an autograd function.
    scale = q.shape[-1] ** -0.5
    out: Tensor = torch.ops.fa3_fwd.fwd(q, k, v, softmax_scale=scale, num_splits=1)[0]
    return out


@flash3.register_fake
def _flash3_shape(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG001
    return q.new_empty(*q.shape[:-1], v.shape[-1])
