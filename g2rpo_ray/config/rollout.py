"""Rollout workers, and the rewards of their pictures."""

from typing import Any, Self

from pydantic import Field, model_validator

from g2rpo_ray.config.base import Section


class RolloutSection(Section):
    """Ray actors that make branches and completions."""

    workers: int = Field(1, ge=1)
    """Number of rollout workers."""
    cpus_per_worker: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for a worker."""
    gpus_per_worker: float = Field(1.0, ge=0)
    """GPUs (or a fraction of one) that Ray reserves for a worker."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes to run on, such as ``ray.io/accelerator-type: H100``; also ``!x`` and
    ``in(x, y)``."""
    threads: int = Field(1, ge=1)
    """Threads of a worker's process; results depend on it in the last bit, so it is fixed here."""
    batch_size: int = Field(8, ge=1)
    """Most evaluations (of one prompt) in one pass of the network. Where each member has its own
    trajectory (the baselines) the learner's passes hold as many, for equal rounding."""
    decode_batch_size: int = Field(8, ge=1)
    """Most pictures in one pass of the VAE."""
    timeout_s: float = Field(1800.0, gt=0)
    """A prompt whose rollout takes longer stops the run."""


class RewardSection(Section):
    """One reward: a scorer, how it is served, and what it counts."""

    kind: str
    """Name of the scorer, see ``g2rpo_ray/rewards/registry.py``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The scorer's own settings, checked by the scorer's ``Options``."""
    weight: float = Field(1.0, ge=0)
    """Share of this reward's advantage in the sum; 0 means: evaluate only, never train on it."""
    required: bool = True
    """Whether an unusable score is treated as ``advantage.on_invalid`` says. If not, the reward is
    left out of that group, the others decide, and the failure is counted."""
    min_replicas: int = Field(1, ge=1)
    """Replicas kept alive."""
    max_replicas: int = Field(1, ge=1)
    """Replicas at most; Ray Serve scales between the two on load."""
    cpus_per_replica: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a replica."""
    gpus_per_replica: float = Field(0.0, ge=0)
    """GPUs (or a fraction) that Ray reserves for a replica."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes to run on, such as ``ray.io/accelerator-type: H100``; also ``!x`` and
    ``in(x, y)``."""
    threads: int = Field(1, ge=1)
    """Threads of a replica's process."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray runtime environment of a replica: ``env_vars`` (API keys by name), ``pip``, ..."""
    batch_size: int = Field(32, ge=1)
    """Most pictures in one pass of the scorer; a batch is cut inside one request."""
    merge_requests: int = Field(1, ge=1)
    """Requests that may share a pass. Above 1 is faster under load, but then rounding depends on
    which requests met."""
    timeout_s: float = Field(300.0, gt=0)
    """A request that takes longer counts as failed."""
    retries: int = Field(2, ge=0)
    """Further tries of a failed request."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, below min_replicas {self.min_replicas}"
            )
        return self
