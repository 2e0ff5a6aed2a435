"""The settings of a reward."""

from typing import Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from g2rpo_ray.common.section import Gpus, Section, problems
from g2rpo_ray.rewards.registry import parse_options, scorer_class

OF_A_REPLICA = (
    "min_replicas", "max_replicas", "cpus_per_replica", "gpus_per_replica", "label_selector",
    "threads", "runtime_env", "requests_per_replica", "upscale_delay_s", "downscale_delay_s",
    "health_timeout_s",
)  # fmt: skip
"""Settings of replicas, which a reward ``beside`` another one has not."""


class RewardSection(Section):
    """One reward: a scorer, how it is served, and what it counts."""

    kind: str
    """Name of the scorer, see ``g2rpo_ray/rewards/registry.py``."""
    options: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """The scorer's own settings, checked by the scorer's ``Options``."""
    weight: float = Field(1.0, ge=0)
    """Share of this reward's advantage in the sum; 0 means: evaluate only, never train on it."""
    required: bool = True
    """Whether an unusable score is treated as ``advantage.on_invalid`` says. If not, the reward is
    left out of that group, the others decide, and the failure is counted."""
    beside: str | None = None
    """Another reward, whose replicas score this one, too: for small scorers, a process less. How
    these are placed, served and kept alive is then said there, and here left out."""
    min_replicas: int = Field(1, ge=1)
    """Replicas kept alive."""
    max_replicas: int = Field(1, ge=1)
    """Replicas at most; Ray Serve scales between the two on load."""
    cpus_per_replica: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a replica."""
    gpus_per_replica: Gpus = 0.0
    """GPUs (or a fraction) that Ray reserves for a replica; 0 computes on the CPU."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes to run on, such as ``ray.io/accelerator-type: H100``; also ``!x`` and
    ``in(x, y)``."""
    threads: int = Field(1, ge=1)
    """Threads of a replica's process."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray runtime environment of a replica (``pip``, ``env_vars``, ...). No secrets, as nowhere
    in the settings: they are written into the run folder, and Ray shows this one."""
    batch_size: int = Field(32, ge=1)
    """Most pictures in one pass of the scorer; a batch is cut inside one request."""
    merge_requests: int = Field(1, ge=1)
    """Requests that may share a pass. Above 1 is faster under load, but then rounding depends on
    which requests met: with ``model.deterministic`` none do."""
    timeout_s: float = Field(300.0, gt=0)
    """A request that takes longer counts as failed. A replica whose scorer hangs for so long is
    replaced."""
    retries: int = Field(2, ge=0)
    """Further tries of a failed request. Replicas that die are no tries: within ``timeout_s`` of
    the try the request is sent again, after pauses that double."""
    requests_per_replica: float = Field(8.0, gt=0)
    """Requests under way for each replica that Serve aims at, between the bounds."""
    upscale_delay_s: float = Field(5.0, ge=0)
    """How long there are more before replicas are added."""
    downscale_delay_s: float = Field(60.0, ge=0)
    """How long there are fewer before replicas are ended."""
    health_timeout_s: float = Field(30.0, gt=0)
    """A replica whose process does not answer Serve for so long is replaced."""

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        scorer_class(kind)
        return kind

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        # A kind that is no scorer's is not in the data: it has an error of its own.
        if "kind" in info.data:
            try:
                parse_options(info.data["kind"], options)
            except ValidationError as error:
                raise ValueError(problems(error)[0]) from error
        return options

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, below min_replicas {self.min_replicas}"
            )
        if self.beside is not None:
            fields = type(self).model_fields
            own = [
                name
                for name in OF_A_REPLICA
                if getattr(self, name) != fields[name].get_default(call_default_factory=True)
            ]
            if own:
                raise ValueError(
                    f"{', '.join(own)} cannot be set beside {self.beside!r}, whose replicas these "
                    "are: set it there, or leave beside out"
                )
        if not isinstance(self.runtime_env.get("env_vars", {}), dict):
            raise ValueError("runtime_env.env_vars must be names with their values")
        return self
