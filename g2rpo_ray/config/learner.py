"""From rewards to updates."""

from typing import Literal, Self

from pydantic import Field, model_validator

from g2rpo_ray.common.section import LARGEST_SHARED, Gpus, Section, check_deadlines
from g2rpo_ray.maths.choices import Combination, Normalisation, StepWeight


class AdvantageSection(Section):
    """From rewards to one number per branch."""

    clamp: float = Field(5.0, gt=0)
    """The integrated advantage is cut to [-clamp, clamp]."""
    min_spread: float = Field(1e-6, ge=0)
    """A group whose standard deviation of a reward is at most this gives zero for that reward."""
    normalisation: Normalisation = "std"
    """``std`` z-scores; ``mean_only`` subtracts the group's mean and keeps the scale."""
    combine: Combination = "advantages"
    """``advantages`` normalises each reward by itself, then weighs and adds; ``rewards`` normalises
    the weighted sum, so that a reward of wide scale counts more."""
    on_invalid: Literal["stop", "drop_group"] = "stop"
    """A NaN, infinite or missing reward stops the run, or drops its (prompt, step) and counts it.
    So does a ratio that is not finite, which leaves out its member alone. A prediction of the
    network in training that is not finite always stops the run: it allows no gradient."""


class WeightSyncSection(Section):
    """How new weights reach the rollout workers."""

    transport: Literal["auto", "object_store", "nccl"] = "auto"
    """``nccl`` broadcasts in place over a process group (gloo between CPUs); ``object_store`` puts
    the weights into Ray's store once. ``auto`` is ``nccl`` for full weights where every worker and
    rank has more than half a GPU, so that no two share one, else ``object_store``."""
    bucket_mib: int = Field(256, ge=1)
    """Size of one broadcast in MiB; every member keeps two buffers of it."""
    timeout_s: float = Field(120.0, gt=0)
    """A sync that takes longer stops the run, and names who did not answer."""


class LearnerSection(Section):
    """DeepSpeed ranks that turn integrated advantages into updates."""

    ranks: int = Field(1, ge=1)
    """Number of learner ranks; the update does not depend on it beyond rounding."""
    cpus_per_rank: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for a rank."""
    gpus_per_rank: Gpus = 1.0
    """GPUs (or a fraction of one) that Ray reserves for a rank; 0 computes on the CPU. With several
    ranks more than half of one, because NCCL takes no two ranks on one card."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes to run on, such as ``ray.io/accelerator-type: H100``; also ``!x`` and
    ``in(x, y)``."""
    threads: int = Field(1, ge=1)
    """Threads of a rank's process."""
    zero_stage: Literal[1, 2, 3] = 2
    """DeepSpeed ZeRO stage."""
    offload_optimizer: bool = False
    """Keep fp32 weights and AdamW's moments in host memory, and update them on the CPU."""
    offload_parameters: bool = False
    """Keep this rank's shard of the weights in host memory, too; needs ``zero_stage: 3``."""
    compile: bool = False
    """Compile the transformer's blocks with torch.compile. Its rounding may differ from the
    rollout's: compile both, or set ``old_log_prob: learner``."""
    update: Literal["per_sde_step", "per_iteration"] = "per_sde_step"
    """One optimizer step per SDE step, or ``updates_per_iteration`` over all of them."""
    updates_per_iteration: int = Field(1, ge=1)
    """With ``update: per_iteration``: optimizer steps of an iteration, each over as many members
    of every prompt, in their order, and all SDE steps; it divides ``sampling.members``."""
    steps_per_pass: int = Field(1, ge=1)
    """SDE steps of a prompt in one pass of the network, with ``update: per_iteration`` and where
    one step is one pass (members share x_k, or fit into ``rollout.batch_size``). Above 1 is faster
    on a card, but then learner and rollout round differently in bfloat16: set ``old_log_prob:
    learner``."""
    learning_rate: float = Field(2e-6, gt=0)
    """AdamW's learning rate after the warm-up."""
    warmup_updates: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, over ``decay_updates``."""
    decay_updates: int | None = Field(None, ge=1)
    """Optimizer steps until the learning rate is ``final_share`` of its peak; then it stays."""
    final_share: float = Field(0.0, ge=0, le=1)
    """Share of the learning rate that ``schedule`` ends with."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep a moving average of the fp32 weights, e.g. with 0.995 an update; it is saved in
    checkpoints for ``g2rpo export`` and ``sample``, and never used in training."""
    weight_decay: float = Field(1e-4, ge=0)
    """AdamW's decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's first decay."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's second decay."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    clip: float = Field(1e-4, gt=0)
    """Half-width of the ratio's trust region; belongs to ``sampling.log_prob: gaussian``."""
    step_weight: StepWeight = "uniform"
    """Weight of a trained step in the loss, of mean 1 over them: ``noise`` is proportional to the
    injected noise sigma_t * sqrt(dt) (TempFlow-GRPO, arXiv 2508.04324), ``inverse_dt`` to 1 / dt
    (GRPO-Guard's gradient reweighting, arXiv 2510.22319)."""
    normalise_ratio: bool = False
    """Give the ratio the same centre and scale at every step (GRPO-Guard's RatioNorm, arXiv
    2510.22319). Log-ratios shrink by the step's noise: the clip must be smaller, such as 2e-6."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference), from velocities (Flow-GRPO, arXiv 2505.05470); the
    reference is the model without its adapters, so it needs ``model.lora``."""
    old_log_prob: Literal["rollout", "learner"] = "rollout"
    """Whose velocity gives the old log-probability: the rollout's, or the learner's own before its
    first update, where the two compute in another form (merged LoRA, other precision)."""
    unguided: bool = False
    """Train the conditional pass alone where classifier-free guidance draws with two: half the
    work, but the ratio is then of another Gaussian than the one that drew (``docs/models.md`` has
    the cost). Needs ``old_log_prob: learner``."""
    timeout_s: float = Field(1800.0, gt=0)
    """A rank that takes longer for an update or a collective counts as hanging, and the learner is
    rebuilt. Once there is a history, five times the median update is enough."""
    min_deadline_s: float = Field(120.0, gt=0)
    """An update may take this long, whatever the history says."""
    max_failures: int = Field(3, ge=0)
    """More failures of ranks than this stop the run with a report: within ``failure_window_s``, or
    one after another in the same update, export or checkpoint."""
    failure_window_s: float = Field(3600.0, gt=0)
    """Time over which failures are counted."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ranks > 1 and 0 < self.gpus_per_rank <= LARGEST_SHARED:
            raise ValueError(
                f"ranks is {self.ranks} and gpus_per_rank is {self.gpus_per_rank:g}; two ranks "
                "could share a card, which NCCL does not take: use one rank, or more than half a "
                "GPU for each"
            )
        if self.steps_per_pass > 1 and self.update == "per_sde_step":
            raise ValueError(
                f"steps_per_pass is {self.steps_per_pass} and update is per_sde_step; steps that "
                "are updates of their own cannot share a pass: use update: per_iteration"
            )
        if self.updates_per_iteration > 1 and self.update == "per_sde_step":
            raise ValueError(
                f"updates_per_iteration is {self.updates_per_iteration} and update is "
                "per_sde_step, which makes one of each SDE step: use update: per_iteration"
            )
        if (self.schedule == "constant") != (self.decay_updates is None):
            raise ValueError(
                f"schedule is {self.schedule} and decay_updates is {self.decay_updates}; linear "
                "and cosine need decay_updates, and constant takes none"
            )
        if self.schedule == "constant" and self.final_share > 0:
            raise ValueError(
                f"final_share is {self.final_share:g} and schedule is constant: nothing would use "
                "it; set schedule: linear or cosine, or leave it out"
            )
        check_deadlines(self.min_deadline_s, self.timeout_s)
        return self
