"""What surrounds the training: evaluation, checkpoints, tracking, the cluster."""

from typing import Literal

from pydantic import Field, field_validator

from g2rpo_ray.common.section import Section


class GuardSection(Section):
    """What training on other rewards may cost a held-out one."""

    max_drop: float = Field(gt=0)
    """How far its held-out mean may fall below that of the first evaluation."""
    then: Literal["warn", "stop", "lower_weight"] = "warn"
    """When it fell further: tell it after every evaluation; or also end the run, with a checkpoint;
    or also lower the weights of the trained rewards that rose."""
    factor: float = Field(0.5, gt=0, lt=1)
    """With ``lower_weight``: each evaluation at which it fell further multiplies by this the weight
    of every trained reward whose held-out mean is above that of the first evaluation."""
    floor: float = Field(0.1, gt=0, le=1)
    """Share of its weight in the configuration below which none is lowered."""


class EvaluationSection(Section):
    """Held-out prompts, drawn without noise injection from fixed seeds."""

    every: int = Field(0, ge=0)
    """Evaluate after every so many iterations; 0 only before the first and after the last."""
    prompts: int = Field(64, ge=1)
    """Number of held-out prompts, evenly spaced over the file; all of them if it has fewer."""
    pictures_per_prompt: int = Field(1, ge=1)
    """Pictures of each prompt, each from its own fixed seed."""
    steps: int = Field(28, ge=1)
    """Evaluations of a trajectory: the deployment's number of steps."""
    height: int | None = Field(None, ge=16)
    """Picture height of ``g2rpo evaluate``, ``demo`` and ``sample``: the deployment's; none is
    ``sampling.height``."""
    width: int | None = Field(None, ge=16)
    """Picture width, likewise."""
    workers: int = Field(0, ge=0)
    """Workers that evaluate while the run trains, each with a rollout worker's resources, at the
    deployment's size. 0: the rollout workers evaluate, at their own, and training waits."""
    patience: int = Field(0, ge=0)
    """The run ends early when so many evaluations in a row brought no new highest held-out mean of
    the reward ``checkpoint.best``; 0 never."""
    min_gain: float = Field(0.0, ge=0)
    """For ``patience``, a mean is a new highest one only by more than this."""
    guards: dict[str, GuardSection] = Field(default_factory=dict)
    """By reward, trained on or not. The prompts whose score fell most are named, and their pictures
    kept for the report; so the first evaluation keeps all of its pictures."""
    pictures_shown: int = Field(16, ge=0)
    """Prompts whose pictures are kept before and after, for the report."""


class CheckpointSection(Section):
    """When the state of a run is written, and how much of it is kept."""

    every: int = Field(10, ge=1)
    """Iterations between checkpoints; one more is written at the end and on a stop."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints kept; older ones are deleted after a new one is verified."""
    snapshot_every: int = Field(1, ge=0)
    """Iterations between snapshots: whole states that the learner writes in the background, the
    last two kept until the next checkpoint is whole. A killed run or rank loses no more than what
    came after. 0 writes none; groups since the last checkpoint then stay in the object store."""
    best: str | None = None
    """A reward: the checkpoint whose evaluation has its highest held-out mean is kept, too, as
    ``best``. It needs checkpoints of evaluated iterations: ``every`` and ``evaluation.every``."""


class TrackingSection(Section):
    """Where metrics go, besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb_project: str | None = None
    """Weights & Biases project; none turns it off. The key comes from the environment."""


class ClusterSection(Section):
    """The Ray cluster."""

    address: str | None = None
    """Ray address; none starts a private one on this machine unless RAY_ADDRESS is set."""
    dashboard: bool = True
    """Start the Ray dashboard with a private cluster; costs about a second and 150 MiB."""
    min_nodes: int = Field(1, ge=1)
    """Nodes that must be there before anything is placed; for launchers that start them one by
    one."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest wait for nodes, for placement, and for actors to load their models."""
    refuse_small_cards: bool = True
    """Before anything is loaded, end a run whose roles need more than the largest card has by over
    a tenth, as ``g2rpo plan`` counts; ``false`` only warns, as where it is less."""
    environment: list[str] = Field(
        default_factory=lambda: ["NCCL_*", "GLOO_*", "TORCH_NCCL_*", "HF_HOME"]
    )
    """Environment variables that workers get from the driver, ``*`` allowed. Never secrets: Ray
    shows them in its dashboard and logs."""

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            if not pattern.strip("*?[]"):
                raise ValueError(f"{pattern!r} would pass on everything; name the variables")
        return patterns
