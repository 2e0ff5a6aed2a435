"""How networks are compiled; their results change by rounding alone."""

import os
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import nn

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import nearest_folder
from g2rpo_ray.config import Config
from g2rpo_ray.models.adapted import sum_in_products
from g2rpo_ray.models.policy import Policy

CODES = 32
"""Most compiled codes of one kind of block: of every place that it has in the network, for each
batch size that is tried, exact and as float8, with and without a mask. PyTorch's own limit is 8."""


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where PyTorch's compiler keeps its code, Triton's kernels included."""


class CompileCacheError(InputError):
    """The folder for compiled code cannot be used."""


def compile_errors() -> tuple[type[Exception], ...]:
    """What a compiled module raises when it is first called and cannot be compiled.

    The compiler takes a second to import: nobody needs it before.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError


def keep_compiled(folder: str | None) -> None:
    """Choose where this process keeps compiled code, for all roles and runs on its node: what is
    compiled again, of the same code, shapes and versions, is read from there.

    Args:
        folder: as ``rollout.compile_cache`` names it.

    Raises:
        CompileCacheError: it cannot be written.
    """
    if folder is None and CACHE_VARIABLE in os.environ:
        return
    if (chosen := _cache_folder(folder, make=True)) is not None:
        os.environ[CACHE_VARIABLE] = str(chosen)


def check_cache(config: Config) -> None:
    """For a dry run, which makes no folder: on this machine, what ``keep_compiled`` refuses.

    Raises:
        CompileCacheError: ``rollout.compile_cache`` cannot be written.
    """
    settings = config.rollout
    on_gpu = settings.gpus_per_worker > 0
    compiled = on_gpu if settings.compile is None else settings.compile
    if settings.compile_cache is not None and (compiled or config.learner.compile):
        _cache_folder(settings.compile_cache, make=False)


def _cache_folder(folder: str | None, *, make: bool) -> Path | None:
    """None: it cannot be written, and nobody named it."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        chosen = Path(folder or f"{caches}/g2rpo_ray/compiled").expanduser().absolute()
        if make:
            chosen.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=nearest_folder(chosen)).close()
    # A RuntimeError: ``~`` of a user without a home.
    except (OSError, RuntimeError) as error:
        if folder is None:
            return None
        raise CompileCacheError(
            f"rollout.compile_cache {folder!r}: cannot be written here ({error}); name a folder "
            "that every node can write, or leave it out"
        ) from error
    return chosen


def compile_blocks(policy: Policy, cache: str | None, *, trained: bool = True) -> None:
    """Compile the repeated blocks when they are first called, for each shape of its own or, in a
    family whose texts vary, for all lengths.

    Args:
        cache: folder of compiled code, see ``keep_compiled``.
        trained: a network that is not gets kernels and products on a card that have no backward
            pass.
    """
    if not trained and policy.transformer.device.type == "cuda":
        policy.family.fuse(policy.transformer)
        sum_in_products(policy.transformer)
    keep_compiled(cache)
    torch._dynamo.config.recompile_limit = CODES
    for _, block in policy.blocks():
        # Automatic: shapes that changed once may change from then on, in the same code.
        block.compile(fullgraph=True, dynamic=None if policy.family.text_varies else False)


def compile_decoder(decoder: nn.Module) -> None:
    """Compile a VAE's decoder when it is first called.

    Channels last suits the card's convolutions, but only in compiled code (H100, 720 x 720: 20 ms a
    picture; eager 33, eager with channels last 38). A decoder that knows videos has weights of five
    axes, which have no such order.
    """
    if all(parameter.ndim < 5 for parameter in decoder.parameters()):
        decoder.to(memory_format=torch.channels_last)
    decoder.compile(fullgraph=True, dynamic=False)


def undo_compilation(network: nn.Module) -> None:
    """Call the modules of ``network`` as they are again."""
    for module in network.modules():
        module._compiled_call_impl = None
