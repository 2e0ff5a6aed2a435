"""Memory of each role in GiB at its peak: on its card, and a learner rank's on its host.

All is counted: what passes hold, on the meta device (``PolicySize``). What PyTorch's allocator does
not show (CUDA's context, fragments, NCCL) is ``RESERVE_GIB``.
"""

import math
from collections.abc import Iterable, Sequence

from g2rpo_ray.config import Config
from g2rpo_ray.plan.costs import CardCosts, PassName
from g2rpo_ray.plan.networks import PolicySize, ScorerSize, learner_bytes
from g2rpo_ray.rewards.section import RewardSection

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

RESERVE_GIB = 3.0
"""A margin of each process on a card; chosen, not measured."""

HOLDER_GIB = 1.0
"""The same of a process that only holds frozen weights for others; chosen, not measured."""

CONTEXT_GIB = 0.6
"""Of a margin, what a process holds also while it has nothing to do; contexts of 0.5 were seen."""

DRAWING, LEARNING = "activations", "activations or AdamW step"
"""What a role holds only while it works: those that draw and score, and ranks."""

STATE_BYTES = 12
"""Of a trained parameter: fp32 master weight and AdamW's two moments."""

AVERAGE_BYTES = 4
"""Of a trained parameter: its moving average in fp32, where one is kept."""

STEP_BYTES = 8
"""Of a trained parameter, while AdamW steps: the gradient in fp32, and AdamW's scratch (4 B were
measured by ``scripts/bench_costs.py``)."""

SUB_GROUP = 1_000_000_000
"""Parameters that ZeRO-3 updates at once (its ``sub_group_size``)."""

REDUCE_BUCKET = 500_000_000
"""Gradients that DeepSpeed has room for before it reduces them (its ``reduce_bucket_size``)."""

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
    evaluation = size.evaluation.peak_bytes * config.rollout.planned_batch_size
    # One weight in 8 bits is widened at a time.
    evaluation += size.widest_parameters * width
    decode = size.decode.peak_bytes * config.rollout.decode_batch_size
    return _with_reserve(
        costs,
        {
            "transformer": (
                _held_bytes(config, size) - _lent_bytes(config, size) + size.buffer_bytes
            )
            / GIB,
            "float8 copy": size.float8_bytes * config.rollout.fp8 / GIB,
            "VAE": size.vae_parameters * width / GIB,
            DRAWING: max(evaluation, decode) / GIB,
        },
    )


def learner_memory(
    config: Config, size: PolicySize, costs: CardCosts, ranks: int, rows: int
) -> PartsGib:
    """A learner rank under ZeRO, on its card, with at most ``rows`` latents in one pass."""
    settings, width = config.learner, BYTES[config.model.dtype]
    stage, trained, held = settings.zero_stage, size.trained_parameters, size.held_parameters
    activations = learner_bytes(config) * rows + size.widest_parameters * width
    # Stage 1 reduces at the update alone, and the engine adapters' gradients in every stage.
    gradients = float(trained * width)
    if stage >= 2 and config.model.lora is None:
        gradients = 0 if settings.offload_optimizer else gradients / ranks
    on_card = 0 if settings.offload_optimizer else trained / ranks
    # Made whole, however few are trained (a CPU keeps what is written): for every pass, or for that
    # alone where gradients are reduced once.
    bucket = float(min(trained, REDUCE_BUCKET) if costs.memory_gib is None else REDUCE_BUCKET)
    bucket *= width
    once = stage < 3 and (stage == 1 or config.model.lora is not None)
    # One after the other: the largest counts.
    working = max(activations, bucket * once, on_card * STEP_BYTES)
    weights = float(_held_bytes(config, size) - _lent_bytes(config, size))
    weights *= not settings.offload_parameters
    parts = {
        "weights": weights / (ranks if stage == 3 else 1) / GIB + size.buffer_bytes / GIB,
        "gradients": gradients / GIB,
        "fp32 master, moments": on_card * state_bytes(config) / GIB,
        "bucket": bucket * (not once) / GIB,
        LEARNING: working / GIB,
    }
    if stage < 3 and config.draws_average:
        parts["old policy"] = trained * width / GIB
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
    # Counted in float32.
    activations = size.image.peak_bytes * reward.batch_size * width / BYTES["float32"]
    return _with_reserve(
        costs, {"weights": size.parameters * width / GIB, DRAWING: activations / GIB}
    )


def card_memory(processes: Sequence[PartsGib], by_turns: bool) -> float:
    """GiB that a card needs for these processes.

    Args:
        by_turns: ranks work while all others wait, and who waits has given back what it does not
            hold (``give_back``): the larger of the two works, beside one margin.
    """
    whole = sum(sum(parts.values()) for parts in processes)
    if not by_turns:
        return whole
    drawing = sum(parts.get(DRAWING, 0.0) for parts in processes)
    learning = sum(parts.get(LEARNING, 0.0) for parts in processes)
    margins = [max(0.0, parts.get("reserve", 0.0) - CONTEXT_GIB) for parts in processes]
    return whole - min(drawing, learning) - sum(margins) + max(margins)


def scorer_pass_name(kind: str) -> PassName:
    """Name of a scorer's pass in the table of costs, for the kinds built on open_clip."""
    return "score_hps" if kind == "hps" else "score_clip"


def state_bytes(config: Config) -> int:
    """Of a trained parameter: master weight, moments, and the average where one is kept."""
    return STATE_BYTES + AVERAGE_BYTES * config.keeps_average


def _held_bytes(config: Config, size: PolicySize) -> int:
    """Of a role's transformer, adapters included."""
    width = BYTES[config.model.dtype]
    return size.trained_parameters * width + size.frozen_bytes(width)


def _lent_bytes(config: Config, size: PolicySize) -> int:
    """Of a role's transformer, what it has from its card's holder."""
    return size.frozen_bytes(BYTES[config.model.dtype]) if config.shares_frozen else 0


def _page_locked(blocks: Iterable[float]) -> float:
    """Bytes of blocks that PyTorch page-locks: each is rounded up to a power of two."""
    return float(sum(1 << (math.ceil(block) - 1).bit_length() for block in blocks if block > 0))


def _with_reserve(costs: CardCosts, parts_gib: PartsGib) -> PartsGib:
    return parts_gib if costs.memory_gib is None else parts_gib | {"reserve": RESERVE_GIB}
