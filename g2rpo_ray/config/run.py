"""One run: all sections, and the rules between them."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from g2rpo_ray.common.secrets import REMEDY, secrets_in
from g2rpo_ray.common.section import LARGEST_SHARED, Section
from g2rpo_ray.config.learner import AdvantageSection, LearnerSection, WeightSyncSection
from g2rpo_ray.config.model import ModelSection, PromptsSection
from g2rpo_ray.config.operation import (
    CheckpointSection,
    ClusterSection,
    EvaluationSection,
    TrackingSection,
)
from g2rpo_ray.config.rollout import AUTO_BATCH_SIZES, FLASH3, RolloutSection
from g2rpo_ray.config.sampling import (
    DanceGrpoSection,
    DiffusionNftSection,
    EGrpoSection,
    FlowGrpoSection,
    G2rpoSection,
    MixGrpoSection,
    SamplingSection,
)
from g2rpo_ray.rewards.section import RewardSection

BRANCHING = ("g2rpo", "e_grpo")
"""Algorithms whose members share x_k, and are completed by evaluations that are not trained on."""


class Config(Section):
    """One run."""

    run_dir: str = Field(min_length=1)
    """Folder of the run: configuration, metrics, checkpoints, pictures, report."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything random: prompt order, initial noise, branch noise."""
    iterations: int = Field(..., ge=1, lt=10**6)
    """Iterations to train: generate, learn, sync."""
    algorithm: Literal[
        "g2rpo", "e_grpo", "mix_grpo", "flow_grpo", "dance_grpo", "diffusion_nft"
    ] = "g2rpo"
    """How the rollout is made; the section of the same name has its settings."""
    pipeline: Literal["sync", "one_step_off"] = "sync"
    """``one_step_off`` draws the next groups with the weights of before while the learner works."""
    max_staleness: int = Field(1, ge=0)
    """A group drawn with weights older than so many versions is never trained on; also how many
    iterations ``one_step_off`` draws ahead. ``sync`` has 0 always."""
    model: ModelSection
    prompts: PromptsSection
    sampling: SamplingSection = SamplingSection()
    g2rpo: G2rpoSection = G2rpoSection()
    e_grpo: EGrpoSection = EGrpoSection()
    mix_grpo: MixGrpoSection = MixGrpoSection()
    flow_grpo: FlowGrpoSection = FlowGrpoSection()
    dance_grpo: DanceGrpoSection = DanceGrpoSection()
    diffusion_nft: DiffusionNftSection = DiffusionNftSection()
    rollout: RolloutSection = RolloutSection()
    rewards: dict[str, RewardSection] = Field(..., min_length=1)
    advantage: AdvantageSection = AdvantageSection()
    learner: LearnerSection = LearnerSection()
    weight_sync: WeightSyncSection = WeightSyncSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    cluster: ClusterSection = ClusterSection()

    @property
    def encoder_threads(self) -> int:
        """Threads of who encodes prompts."""
        return self.prompts.encoder_threads or self.rollout.threads

    @property
    def trained_rewards(self) -> dict[str, RewardSection]:
        """The rewards whose advantages are trained on, in a fixed order."""
        return {n: r for n, r in sorted(self.rewards.items()) if r.weight > 0}

    @property
    def deployment_size(self) -> dict[str, int]:
        """``height`` and ``width`` of the pictures that a run is judged by."""
        evaluation, sampling = self.evaluation, self.sampling
        return {
            "height": evaluation.height or sampling.height,
            "width": evaluation.width or sampling.width,
        }

    @property
    def draws_average(self) -> bool:
        """Whether pictures are drawn by a moving average of the policy in training."""
        return self.algorithm == "diffusion_nft"

    @property
    def keeps_average(self) -> bool:
        """Whether the learner keeps a moving average of its fp32 weights."""
        return self.draws_average or self.learner.ema_decay is not None

    def reweighted(self, scales: Mapping[str, float]) -> Self:
        """With the weights of rewards multiplied, as a guard with ``lower_weight`` does."""
        rewards = {
            name: reward.model_copy(update={"weight": reward.weight * scales.get(name, 1.0)})
            for name, reward in self.rewards.items()
        }
        return self.model_copy(update={"rewards": rewards})

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, tree: Any) -> Any:
        # First of all: what is wrong otherwise would be shown with its value.
        if found := list(secrets_in(tree)):
            raise ValueError(f"{'; '.join(found)}. {REMEDY}")
        return tree

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_steps()
        self._check_forward_process()
        if self.learner.kl_weight > 0 and self.model.lora is None:
            raise ValueError(
                f"learner.kl_weight is {self.learner.kl_weight} and model.lora is not set; the "
                "reference is the model without its adapters: set model.lora, or kl_weight 0"
            )
        if self.learner.normalise_ratio and self.sampling.log_prob != "gaussian":
            raise ValueError(
                f"learner.normalise_ratio is true and sampling.log_prob is "
                f"{self.sampling.log_prob}; it needs log_prob: gaussian"
            )
        if self.learner.unguided and self.learner.old_log_prob != "learner":
            raise ValueError(
                "learner.unguided is true and learner.old_log_prob is rollout: the rollout's "
                "velocities are guided, and the ratio would not begin at 1; set old_log_prob: "
                "learner"
            )
        if not self.trained_rewards:
            raise ValueError("rewards: every weight is 0; at least one reward must be trained on")
        self._check_evaluation()
        if self.learner.offload_parameters and self.learner.zero_stage != 3:
            raise ValueError(
                f"learner.offload_parameters is true and learner.zero_stage is "
                f"{self.learner.zero_stage}; only stage 3 splits the weights: set zero_stage 3"
            )
        if self.model.share_frozen is True and self.learner.zero_stage == 3:
            raise ValueError(
                "model.share_frozen is true and learner.zero_stage is 3, which splits the frozen "
                "weights, too; set zero_stage 1 or 2, or share_frozen: auto"
            )
        if self.model.frozen_dtype is not None and self.learner.zero_stage == 3:
            raise ValueError(
                f"model.frozen_dtype is {self.model.frozen_dtype} and learner.zero_stage is 3, "
                "which splits weights that are parameters alone; set zero_stage 1 or 2"
            )
        if self.rollout.attention == FLASH3 and self.model.dtype != "bfloat16":
            raise ValueError(
                f"rollout.attention is {FLASH3} and model.dtype is {self.model.dtype}: it has code "
                "for bfloat16 alone; set that, or leave rollout.attention out"
            )
        self._check_pipeline()
        self._check_transport()
        self._check_passes()
        self._check_estimates()
        for name, reward in self.rewards.items():
            hosts = [n for n, r in self.rewards.items() if r.beside is None]
            if reward.beside is not None and reward.beside not in hosts:
                raise ValueError(
                    f"rewards.{name}.beside is {reward.beside!r}; it must name a reward with "
                    f"replicas of its own: {', '.join(hosts) or 'there is none'}"
                )
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(
                    f"rewards.{name}: a reward's name may hold a-z, 0-9 and _, and starts with a "
                    "letter (it becomes a metric's name)"
                )
        return self

    def _check_pipeline(self) -> None:
        if self.pipeline == "sync":
            return
        if self.max_staleness < 1:
            raise ValueError(
                "pipeline is one_step_off and max_staleness 0: it trains on groups one version old "
                "at least; use max_staleness 1 or more, or pipeline: sync"
            )
        if self.learner.old_log_prob == "learner":
            raise ValueError(
                "pipeline is one_step_off and learner.old_log_prob is learner: the learner no "
                "longer has the weights that drew the groups; use old_log_prob: rollout"
            )

    def _check_evaluation(self) -> None:
        evaluation, best = self.evaluation, self.checkpoint.best
        if evaluation.workers and not evaluation.every:
            raise ValueError(
                f"evaluation.workers is {evaluation.workers} and evaluation.every is 0: they would "
                "have nothing to do while the run trains; set every, or workers 0"
            )
        if evaluation.patience and best is None:
            raise ValueError(
                f"evaluation.patience is {evaluation.patience} and checkpoint.best is not set: "
                "name the reward that decides there"
            )
        if evaluation.min_gain and not evaluation.patience:
            raise ValueError(
                f"evaluation.min_gain is {evaluation.min_gain:g} and evaluation.patience is 0: "
                "nothing would use it; set patience, or leave min_gain out"
            )
        if unknown := evaluation.guards.keys() - self.rewards.keys():
            raise ValueError(
                f"evaluation.guards.{min(unknown)}: no such reward; rewards are "
                f"{', '.join(sorted(self.rewards))}"
            )
        if evaluation.guards and not evaluation.every:
            raise ValueError(
                "evaluation.guards are set and evaluation.every is 0: the one evaluation after the "
                "first comes when the run is over; set every"
            )
        lowers = any(guard.then == "lower_weight" for guard in evaluation.guards.values())
        alike = (self.advantage.combine, self.advantage.normalisation) == ("rewards", "std")
        if lowers and alike and len(self.trained_rewards) == 1:
            raise ValueError(
                f"evaluation.guards has then: lower_weight, {next(iter(self.trained_rewards))} is "
                "the one trained reward and advantage.combine is rewards: its sum is normalised "
                "after weighing, so that a lower weight changes nothing; use then: stop, or "
                "combine: advantages"
            )
        if best is None:
            return
        if best not in self.rewards:
            raise ValueError(
                f"checkpoint.best is {best!r}; rewards are {', '.join(sorted(self.rewards))}"
            )
        if evaluation.every == 0 or evaluation.every % self.checkpoint.every:
            raise ValueError(
                f"checkpoint.best is set, checkpoint.every is {self.checkpoint.every} and "
                f"evaluation.every is {evaluation.every}; every evaluation needs a checkpoint: "
                "make evaluation.every a multiple of checkpoint.every"
            )

    @property
    def shares_frozen(self) -> bool:
        """``model.share_frozen``, where ``auto`` is for adapters whose worker and rank, or two of
        whose workers, fit on one card, if no rank splits the weights."""
        if self.model.share_frozen != "auto":
            return self.model.share_frozen
        worker, rank = self.rollout.gpus_per_worker, self.learner.gpus_per_rank
        workers = self.rollout.most_workers + self.evaluation.workers
        two_workers = workers > 1 and 0 < worker <= LARGEST_SHARED
        both = worker > 0 and rank > 0 and worker + rank <= 1
        split = self.learner.zero_stage == 3
        return self.model.lora is not None and not split and (two_workers or both)

    @property
    def weight_transport(self) -> Literal["object_store", "nccl"]:
        """``weight_sync.transport``, where ``auto`` is NCCL for full weights if no two workers or
        ranks fit on one card (NCCL takes no two members there), else the object store."""
        if self.weight_sync.transport != "auto":
            return self.weight_sync.transport
        smallest = min(self.rollout.gpus_per_worker, self.learner.gpus_per_rank)
        own_cards = smallest > LARGEST_SHARED
        return "nccl" if own_cards and self.model.lora is None else "object_store"

    def _check_transport(self) -> None:
        if self.weight_sync.transport != "nccl":
            return
        worker, rank = self.rollout.gpus_per_worker, self.learner.gpus_per_rank
        values = f"rollout.gpus_per_worker is {worker:g} and learner.gpus_per_rank is {rank:g}"
        if any(0 < share <= LARGEST_SHARED for share in (worker, rank)):
            raise ValueError(
                f"weight_sync.transport is nccl, {values}: NCCL takes no two members on one card; "
                "use transport: object_store, or more than half a GPU for every worker and rank"
            )
        if (worker == 0) != (rank == 0):
            raise ValueError(
                f"weight_sync.transport is nccl, {values}: 0 is the CPU, and no process group "
                "joins a CPU with cards; use transport: object_store, or cards for both or neither"
            )

    def _check_steps(self) -> None:
        # Only the section in use: the others' defaults belong to longer schedules.
        steps = self.sampling.steps
        allowed = (
            f"with sampling.steps={steps} the stochastic steps are among 0 to {steps - 2} (the "
            "last step must be deterministic)"
        )
        if self.algorithm == "g2rpo":
            for key in ("sde_steps", "granularities"):
                values = getattr(self.g2rpo, key)
                if len(set(values)) != len(values):
                    raise ValueError(f"g2rpo.{key} is {values}; a value stands there twice")
            if (smallest := min(self.g2rpo.granularities)) < 1:
                raise ValueError(f"g2rpo.granularities has {smallest}; allowed: 1 or more")
            for k in self.g2rpo.sde_steps:
                if not 0 <= k <= steps - 2:
                    raise ValueError(f"g2rpo.sde_steps has {k}; {allowed}")
        elif self.algorithm == "mix_grpo":
            if self.mix_grpo.window > steps - 1:
                raise ValueError(
                    f"mix_grpo.window is {self.mix_grpo.window}, longer than the schedule; "
                    f"{allowed}"
                )
            last_place = steps - 1 - self.mix_grpo.window
            if self.mix_grpo.stride > max(1, last_place):
                raise ValueError(
                    f"mix_grpo.stride is {self.mix_grpo.stride} and the window's last place is "
                    f"{last_place}: it would never move; use a smaller stride or window ({allowed})"
                )
        elif self.algorithm in ("e_grpo", "flow_grpo", "dance_grpo"):
            first = getattr(self, self.algorithm).first
            if first is not None and first > steps - 1:
                raise ValueError(f"{self.algorithm}.first is {first}; {allowed}")

    def _check_forward_process(self) -> None:
        if self.algorithm != "diffusion_nft":
            return
        times, learner = self.diffusion_nft.times_per_picture, self.learner
        if times > self.sampling.steps:
            raise ValueError(
                f"diffusion_nft.times_per_picture is {times} and sampling.steps is "
                f"{self.sampling.steps}; there are no more noise levels than steps"
            )
        for key, value, why in (
            ("update", "per_iteration", "it has no SDE steps"),
            ("step_weight", "uniform", "it has no SDE steps"),
            ("old_log_prob", "rollout", "it has no log-probability, the rollout's policy is old"),
            ("normalise_ratio", False, "it has no ratio"),
            ("ema_decay", None, "the one moving average that is kept is its old policy"),
        ):
            if (found := getattr(learner, key)) != value:
                raise ValueError(
                    f"learner.{key} is {found} and algorithm is diffusion_nft: {why}; use "
                    f"learner.{key}={'null' if value is None else str(value).lower()}"
                )

    def _check_passes(self) -> None:
        if self.sampling.members % self.learner.updates_per_iteration:
            raise ValueError(
                f"learner.updates_per_iteration is {self.learner.updates_per_iteration} and "
                f"sampling.members is {self.sampling.members}; each update takes as many members: "
                "use a number that divides them"
            )
        # With "auto" the batch is known only on the card; at most it is as large as this.
        batch_size = self.rollout.batch_size
        largest = max(AUTO_BATCH_SIZES) if batch_size == "auto" else batch_size
        together = self.learner.steps_per_pass
        members = self.sampling.members // self.learner.updates_per_iteration
        if together > 1 and self.algorithm not in BRANCHING and members > largest:
            raise ValueError(
                f"learner.steps_per_pass is {together}, but a step of {self.algorithm} alone takes "
                f"several passes: sampling.members is {self.sampling.members} and "
                f"rollout.batch_size {batch_size}. Use steps_per_pass: 1, or a batch_size of "
                f"{members}"
            )

    def _check_estimates(self) -> None:
        rollout, granularities = self.rollout, self.g2rpo.granularities
        estimated = {"fp8": rollout.fp8, "completion_stride": rollout.completion_stride > 1}
        for key, used in estimated.items():
            if used and self.algorithm not in BRANCHING:
                raise ValueError(
                    f"{rollout.asked(key)}, and algorithm is {self.algorithm}: only algorithm: "
                    "g2rpo and e_grpo have evaluations that are not trained on; leave it out"
                )
        stride, finest = rollout.completion_stride, min(granularities)
        if self.algorithm == "g2rpo" and 1 < stride <= finest:
            raise ValueError(
                f"{rollout.asked('completion_stride')}, and g2rpo.granularities is "
                f"{granularities}, of which none is finer: nothing would be saved. Use a stride "
                f"of {finest + 1} or more, or 1"
            )
        steps = self.sampling.steps
        first = min(self.g2rpo.sde_steps) + 1 if self.algorithm == "g2rpo" else 1
        # From the first evaluation of the longest walk to its last; a wider one says no more.
        widest = max(1, steps - 1 - first)
        if stride > widest:
            raise ValueError(
                f"{rollout.asked('completion_stride')}, and with sampling.steps={steps} the "
                f"longest completion has steps {first} to {steps - 1}. Use "
                + (f"a stride of 1 to {widest}" if widest > 1 else "1, or more steps")
            )
        if rollout.fp8 and rollout.gpus_per_worker and self.model.dtype != "bfloat16":
            # PyTorch's kernels add no bias to a float32 answer.
            raise ValueError(
                f"{rollout.asked('fp8')}, and model.dtype is {self.model.dtype}: on a card float8 "
                "products need model.dtype: bfloat16; set it, or leave the other out"
            )
