"""Device memory of each role, in GiB, at its peak.

Weights, gradients and optimizer state are counted; activations are scaled from measured ones. What
PyTorch's allocator does not show (CUDA's context, fragments, NCCL) is ``RESERVE_GIB``.
"""

from dataclasses import dataclass

from g2rpo_ray.config import Config, RewardSection
from g2rpo_ray.plan.costs import CardCosts, PassName
from g2rpo_ray.plan.networks import PolicySize, ScorerSize

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}

RESERVE_GIB = 3.0
"""A margin of each process on a card; chosen, not measured."""

STATE_BYTES = 12
"""Of a trained parameter: fp32 master weight and AdamW's two moments."""

STEP_BYTES = 8
"""Of a trained parameter, while AdamW steps: the gradient in fp32, and AdamW's scratch (4 B were
measured by ``scripts/bench_costs.py``)."""

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


@dataclass(frozen=True)
class RoleMemory:
    """What one process of a role holds on its card."""

    parts_gib: dict[str, float]

    @property
    def total_gib(self) -> float:
        return sum(self.parts_gib.values())


def learner_pass_name(lora: bool, checkpointing: bool) -> PassName:
    """Name of a learner's pass in the table of costs."""
    if lora:
        return "learner_lora_checkpointing" if checkpointing else "learner_lora"
    return "learner_full_checkpointing" if checkpointing else "learner_full"


def rollout_memory(config: Config, size: PolicySize, costs: CardCosts) -> RoleMemory:
    """A rollout worker: evaluations and decoding take turns, so the larger one counts."""
    width = BYTES[config.model.dtype]
    evaluation = _activations_gib(costs, "evaluation", config.rollout.planned_batch_size)
    decode = _activations_gib(costs, "decode", config.rollout.decode_batch_size)
    reference = costs.reference
    evaluation *= size.tokens * size.width / (reference.tokens * reference.width)
    decode *= size.pixels / reference.pixels
    # The transformer of a LoRA run carries the adapters, too.
    adapters = size.trained_parameters if config.model.lora else 0
    return _role(
        costs,
        {
            "transformer": (size.parameters + adapters) * width / GIB,
            "VAE": size.vae_parameters * width / GIB,
            "activations": max(evaluation, decode),
        },
    )


def learner_memory(
    config: Config, size: PolicySize, costs: CardCosts, ranks: int, rows: int
) -> RoleMemory:
    """A learner rank under ZeRO.

    Args:
        rows: most latents in one pass.
    """
    stage, width = config.learner.zero_stage, BYTES[config.model.dtype]
    trained, frozen = size.trained_parameters, 0
    if config.model.lora:
        frozen = size.parameters
    reference = costs.reference
    measured = _measured_alike(costs, config.model.gradient_checkpointing)
    activations = _activations_gib(costs, measured, rows)
    activations *= size.tokens * size.width * size.blocks
    activations /= reference.tokens * reference.width * reference.blocks
    # Activations are gone when the optimizer steps: the larger of the two counts.
    working = max(activations, trained * STEP_BYTES / ranks / GIB)
    parts = {
        "weights": (trained + frozen) * width / (ranks if stage == 3 else 1) / GIB,
        "gradients": trained * width / (ranks if stage >= 2 else 1) / GIB,
        "fp32 master, moments": trained * STATE_BYTES / ranks / GIB,
        "buckets": min(REDUCE_BUCKET, trained) * width / GIB,
        "activations or AdamW step": working,
    }
    if stage == 3 and ranks > 1:
        parts["gathered weights"] = min(LIVE_PARAMETERS, trained + frozen) * width / GIB
    return _role(costs, parts)


def scorer_memory(reward: RewardSection, size: ScorerSize, costs: CardCosts) -> RoleMemory:
    """A replica of an open_clip reward; scorers compute in float32."""
    measured = _activations_gib(costs, scorer_pass_name(reward.kind), reward.batch_size)
    point = costs.measured(scorer_pass_name(reward.kind))[-1]
    measured *= size.image.tflop / (point.tflop / point.batch)
    weights = size.parameters * BYTES["float32"] / GIB
    return _role(costs, {"weights": weights, "activations": measured})


def scorer_pass_name(kind: str) -> PassName:
    """Name of a scorer's pass in the table of costs, for the kinds built on open_clip."""
    return "score_hps" if kind == "hps" else "score_clip"


def _role(costs: CardCosts, parts_gib: dict[str, float]) -> RoleMemory:
    if costs.memory_gib is None:
        return RoleMemory(parts_gib)
    return RoleMemory({**parts_gib, "reserve": RESERVE_GIB})


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
