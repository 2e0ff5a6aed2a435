"""Rollout workers, and the rewards of their pictures."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from g2rpo_ray.config.base import Gpus, Section, check_deadlines
from g2rpo_ray.secrets import looks_secret

AUTO_BATCH_SIZES = (16, 8, 4, 2, 1)
"""What ``batch_size: auto`` tries; above 16 nothing is gained at 720 x 720 on an H100."""


class RolloutSection(Section):
    """Ray actors that make branches and completions."""

    workers: int = Field(1, ge=1)
    """Rollout workers that the run starts with; it waits for all of them."""
    min_workers: int = Field(1, ge=1)
    """Later fewer may be left, as nodes go; below this number for longer than
    ``cluster.start_timeout_s`` the run stops."""
    max_workers: int | None = Field(None, ge=1)
    """Workers at most, as the cluster has room for them; none means ``workers``."""
    cpus_per_worker: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for a worker."""
    gpus_per_worker: Gpus = 1.0
    """GPUs (or a fraction of one) that Ray reserves for a worker; 0 computes on the CPU."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes to run on, such as ``ray.io/accelerator-type: H100``; also ``!x`` and
    ``in(x, y)``."""
    threads: int = Field(1, ge=1)
    """Threads of a worker's process; results depend on it in the last bit, so it is fixed here."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 8
    """Most evaluations (of one prompt) in one pass of the network; ``auto`` tries on a GPU which of
    16, 8, 4, 2, 1 fits, the ``fp8`` copy of the weights included. Results depend on it in the last
    bit. Where each member has its own trajectory (the baselines) the learner's passes hold as many,
    for equal rounding."""
    decode_batch_size: int = Field(4, ge=1)
    """Most pictures in one pass of the VAE."""
    decode_tile_above_px: int = Field(2048, ge=64)
    """Decode in tiles, with less memory, if height or width is above this."""
    compile: bool | None = None
    """Compile the network's blocks and the VAE's decoder (``torch.compile``); none: on a GPU. Where
    compiling fails, a warning is printed and the run goes on without it."""
    compile_cache: str | None = None
    """Folder of compiled code, shared by workers and runs; none is PyTorch's temporary one."""
    attention: str | None = None
    """``cudnn``, ``flash``, ``efficient`` or ``math`` of PyTorch's SDPA, or a backend of diffusers
    (``sage``, ``_flash_3``, ...); none: cudnn on a GPU."""
    fp8: bool = False
    """Completions compute their matrix products from 8-bit numbers: docs/performance.md has the
    price. The anchor, whose velocities are trained on, never does."""
    fp8_above_sigma: float = Field(0.0, ge=0, lt=1)
    """Noise level above which completions use ``fp8``; up to it, where rounding shows in the
    picture most, they are exact."""
    thin_completions: bool = False
    """Completions of granularity 1 evaluate the network at every other step only, and step by a
    multistep method of second order: docs/performance.md has the price."""
    timeout_s: float = Field(1800.0, gt=0)
    """A worker that takes longer for a prompt counts as hanging: it is replaced, and its prompt
    goes elsewhere. Once there is a history, five times the median duration is enough."""
    min_deadline_s: float = Field(60.0, gt=0)
    """A prompt may take this long, whatever the history says."""
    attempts: int = Field(4, ge=1)
    """A prompt that failed on so many workers stops the run."""

    @property
    def most_workers(self) -> int:
        """Workers at most."""
        return self.workers if self.max_workers is None else self.max_workers

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.min_workers <= self.workers <= self.most_workers:
            raise ValueError(
                f"min_workers {self.min_workers} <= workers {self.workers} <= max_workers "
                f"{self.most_workers} does not hold"
            )
        check_deadlines(self.min_deadline_s, self.timeout_s)
        if self.fp8_above_sigma > 0 and not self.fp8:
            raise ValueError(
                f"fp8_above_sigma is {self.fp8_above_sigma} and fp8 is false: nothing uses it; "
                "set fp8: true, or leave it out"
            )
        return self

    @property
    def planned_batch_size(self) -> int:
        """``batch_size``, and 8 for ``auto`` as long as nothing was tried."""
        return 8 if self.batch_size == "auto" else self.batch_size


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
    gpus_per_replica: Gpus = 0.0
    """GPUs (or a fraction) that Ray reserves for a replica; 0 computes on the CPU."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes to run on, such as ``ray.io/accelerator-type: H100``; also ``!x`` and
    ``in(x, y)``."""
    threads: int = Field(1, ge=1)
    """Threads of a replica's process."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray runtime environment of a replica (``pip``, ``env_vars``, ...). A variable that looks like
    a secret is refused: the configuration is written into the run folder."""
    batch_size: int = Field(32, ge=1)
    """Most pictures in one pass of the scorer; a batch is cut inside one request."""
    merge_requests: int = Field(1, ge=1)
    """Requests that may share a pass. Above 1 is faster under load, but then rounding depends on
    which requests met."""
    timeout_s: float = Field(300.0, gt=0)
    """A request that takes longer counts as failed. A replica whose scorer hangs for so long is
    replaced."""
    retries: int = Field(2, ge=0)
    """Further tries of a failed request. Replicas that die are no tries: within ``timeout_s`` the
    request is sent again, after pauses that double."""
    requests_per_replica: float = Field(8.0, gt=0)
    """Requests under way for each replica that Serve aims at, between the bounds."""
    upscale_delay_s: float = Field(5.0, ge=0)
    """How long there are more before replicas are added."""
    downscale_delay_s: float = Field(60.0, ge=0)
    """How long there are fewer before replicas are ended."""
    health_timeout_s: float = Field(30.0, gt=0)
    """A replica whose process does not answer Serve for so long is replaced."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, below min_replicas {self.min_replicas}"
            )
        variables = self.runtime_env.get("env_vars", {})
        if not isinstance(variables, dict):
            raise ValueError("runtime_env.env_vars must be names with their values")
        for name in variables:
            if looks_secret(str(name)):
                raise ValueError(
                    f"runtime_env.env_vars has {name}, which looks like a secret; the "
                    "configuration is written into the run folder, and Ray shows it. Set it in the "
                    "nodes' own environment (Kubernetes secret, Slurm's job environment) instead"
                )
        return self
