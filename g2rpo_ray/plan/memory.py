"""Memory of each role in GiB at its peak: on its card, and a learner rank's on its host.

Weights, gradients and optimizer state are counted; activations are scaled from measured ones. What
PyTorch's allocator does not show (CUDA's context, fragments, NCCL) is ``RESERVE_GIB``.
"""

import math
from collections.abc import Iterable

from g2rpo_ray.config import Config
from g2rpo_ray.plan.costs import CardCosts, PassName
from g2rpo_ray.plan.networks import PolicySize, ScorerSize
from g2rpo_ray.rewards.section import RewardSection

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

RESERVE_GIB = 3.0
"""A margin of each process on a card; chosen, not measured."""

HOLDER_GIB = 1.0
"""The same of a process that only holds frozen weights for others; chosen, not measured."""

STATE_BYTES = 12
"""Of a trained parameter: fp32 master weight and AdamW's two moments."""

AVERAGE_BYTES = 4
"""Of a trained parameter with ``learner.ema_decay``: its average in fp32."""

STEP_BYTES = 8
"""Of a trained parameter, while AdamW steps: the gradient in fp32, and AdamW's scratch (4 B were
measured by ``scripts/bench_costs.py``)."""

SUB_GROUP = 1_000_000_000
"""Parameters that ZeRO-3 updates at once (its ``sub_group_size``)."""

REDUCE_BUCKET = 500_000_000
"""Gradients that DeepSpeed gathers before it reduces them (its ``reduce_bucket_size``)."""

LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at most (its ``stage3_max_live_parameters``)."""

LEARNER_FORWARDS: dict[PassName, int] = {
    "learner_lora": 2,
    "learner_lora_checkpointing": 3,
    "learner_full": 3,
    "learner_full_checkpointing": 4,
}
"""Operations of a forward and backward pass, in forward passes: one forward, one for the gradients
of the activations, one for those of all weights, one forward more with checkpointing."""


PartsGib = dict[str, float]
"""What a process holds, by what it is; their sum is its peak."""


def learner_pass_name(lora: bool, checkpointing: bool) -> PassName:
    """Name of a learner's pass in the table of costs."""
    if lora:
        return "learner_lora_checkpointing" if checkpointing else "learner_lora"
    return "learner_full_checkpointing" if checkpointing else "learner_full"


def frozen_memory(config: Config, size: PolicySize, costs: CardCosts) -> PartsGib:
    """What the roles on a card share (``shares_frozen``), in its holder."""
    parts = {"transformer": _lent_bytes(config, size) / GIB}
    return parts if costs.memory_gib is None else parts | {"reserve": HOLDER_GIB}


def rollout_memory(config: Config, size: PolicySize, costs: CardCosts) -> PartsGib:
    """A rollout worker: evaluations and decoding take turns, so the larger one counts."""
    width = BYTES[config.model.dtype]
    evaluation = _activations_gib(costs, "evaluation", config.rollout.planned_batch_size)
    decode = _activations_gib(costs, "decode", config.rollout.decode_batch_size)
    reference = costs.reference
    evaluation *= size.passes * size.tokens * size.width / (reference.tokens * reference.width)
    decode *= size.pixels / reference.pixels
    return _with_reserve(
        costs,
        {
            "transformer": (size.held_parameters * width - _lent_bytes(config, size)) / GIB,
            "VAE": size.vae_parameters * width / GIB,
            "activations": max(evaluation, decode),
        },
    )


def learner_memory(
    config: Config, size: PolicySize, costs: CardCosts, ranks: int, rows: int
) -> PartsGib:
    """A learner rank under ZeRO, on its card.

    Args:
        rows: most latents in one pass.
    """
    settings, width = config.learner, BYTES[config.model.dtype]
    stage, trained, held = settings.zero_stage, size.trained_parameters, size.held_parameters
    # Stage 1 reduces at the update alone, and the engine adapters' gradients in every stage.
    gradients = float(trained * width)
    if stage >= 2 and config.model.lora is None:
        gradients = 0 if settings.offload_optimizer else gradients / ranks
    on_card = 0 if settings.offload_optimizer else trained / ranks
    reference = costs.reference
    measured = _measured_alike(costs, config.model.gradient_checkpointing)
    activations = _activations_gib(costs, measured, rows)
    activations *= size.learner_passes * size.tokens * size.width * size.blocks
    activations /= reference.tokens * reference.width * reference.blocks
    # Activations are gone when the optimizer steps: the larger of the two counts.
    working = max(activations, on_card * STEP_BYTES / GIB)
    weights = 0.0 if settings.offload_parameters else held * width - _lent_bytes(config, size)
    parts = {
        "weights": weights / (ranks if stage == 3 else 1) / GIB,
        "gradients": gradients / GIB,
        "fp32 master, moments": on_card * state_bytes(config) / GIB,
        "buckets": min(REDUCE_BUCKET, trained) * width / GIB,
        "activations or AdamW step": working,
    }
    if stage == 3 and (ranks > 1 or settings.offload_parameters):
        parts["gathered weights"] = min(LIVE_PARAMETERS, held) * width / GIB
    return _with_reserve(costs, parts)


def learner_host_memory(config: Config, size: PolicySize, ranks: int) -> PartsGib:
    """What a learner rank keeps in host memory, beside its process and the libraries' own.

    With an offloaded optimizer as in DeepSpeed 0.19's ``stage3.py`` and ``stage_1_and_2.py``, which
    page-lock all but the moments (and, in stage 3, the master weights).
    """
    settings, width = config.learner, BYTES[config.model.dtype]
    shard, stage = size.trained_parameters / ranks, settings.zero_stage
    state = shard * state_bytes(config)
    parts = {}
    if settings.offload_optimizer and stage == 3:
        groups = [min(SUB_GROUP, shard - start) for start in range(0, int(shard), SUB_GROUP)]
        parts["fp32 master, moments"] = state
        parts["gradients"] = _page_locked([*(4 * group for group in groups), width * shard])
    elif settings.offload_optimizer:
        # Each pass adds to the sum that is kept here; stage 1 and adapters are reduced once.
        summed = width * shard if stage == 2 and config.model.lora is None else 0
        parts["fp32 master, moments"] = state - 4 * shard + _page_locked([4 * shard])
        parts["gradients"] = summed + _page_locked([4 * shard])
        parts["new weights"] = _page_locked([width * shard])
    if settings.offload_parameters:
        parts["weights"] = size.held_parameters / ranks * width
    # Kept from the first checkpoint or snapshot on.
    parts["copy for checkpoints"] = state
    return {name: amount / GIB for name, amount in parts.items()}


def scorer_memory(reward: RewardSection, size: ScorerSize, costs: CardCosts) -> PartsGib:
    """A replica of an open_clip reward, in its own dtype."""
    width = BYTES[reward.options.get("dtype", "float32")]
    activations = _activations_gib(costs, scorer_pass_name(reward.kind), reward.batch_size)
    point = costs.measured(scorer_pass_name(reward.kind))[-1]
    activations *= size.image.tflop / (point.tflop / point.batch)
    # They were measured in float32.
    activations *= width / BYTES["float32"]
    return _with_reserve(
        costs, {"weights": size.parameters * width / GIB, "activations": activations}
    )


def scorer_pass_name(kind: str) -> PassName:
    """Name of a scorer's pass in the table of costs, for the kinds built on open_clip."""
    return "score_hps" if kind == "hps" else "score_clip"


def state_bytes(config: Config) -> int:
    """Of a trained parameter: master weight, moments, and the average where one is kept."""
    return STATE_BYTES + AVERAGE_BYTES * (config.learner.ema_decay is not None)


def _lent_bytes(config: Config, size: PolicySize) -> int:
    """Of a role's transformer, what it has from its card's holder."""
    return size.frozen_parameters * BYTES[config.model.dtype] if config.shares_frozen else 0


def _page_locked(blocks: Iterable[float]) -> float:
    """Bytes of blocks that PyTorch page-locks: each is rounded up to a power of two."""
    return float(sum(1 << (math.ceil(block) - 1).bit_length() for block in blocks if block > 0))


def _with_reserve(costs: CardCosts, parts_gib: PartsGib) -> PartsGib:
    return parts_gib if costs.memory_gib is None else parts_gib | {"reserve": RESERVE_GIB}


def _activations_gib(costs: CardCosts, name: PassName, batch: int) -> float:
    """In proportion to the batch, from the largest one measured; 0 on a CPU.

    Raises:
        CostsError: not measured.
    """
    largest = max(costs.measured(name), key=lambda point: point.batch)
    return (largest.activations_gib or 0.0) * batch / largest.batch


def _measured_alike(costs: CardCosts, checkpointing: bool) -> PassName:
    """A learner's pass that keeps the same activations; which weights are trained matters less."""
    names = [learner_pass_name(lora, checkpointing) for lora in (False, True)]
    # Nothing is known of the memory of a CPU, and any pass says so.
    others = LEARNER_FORWARDS if costs.memory_gib is None else ()
    return next((name for name in (*names, *others) if costs.passes.get(name)), names[0])
