"""Rollout workers, and the rewards of their pictures."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from g2rpo_ray.common.section import Gpus, Section, check_deadlines

AUTO_BATCH_SIZES = (16, 8, 4, 2, 1)
"""What ``batch_size: auto`` tries; above 16 nothing is gained at 720 x 720 on an H100."""

FLASH3 = "flash3"
"""``attention`` by FlashAttention-3, of the package fa3-fwd."""

SPEEDS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "exact": {"fp8": False, "fp8_above_sigma": 0.0, "completion_stride": 1},
        "balanced": {"fp8": False, "fp8_above_sigma": 0.0, "completion_stride": 2},
        "fast": {"fp8": False, "fp8_above_sigma": 0.0, "completion_stride": 3},
    }
)
"""Points of the measured frontier of speed and accuracy, and what each of them sets."""


class RolloutSection(Section):
    """Ray actors that make branches and completions."""

    workers: int = Field(1, ge=1)
    """Rollout workers that the run starts with; it waits for all of them."""
    min_workers: int = Field(1, ge=1)
    """Later fewer may be left, as nodes go; below this number for longer than
    ``cluster.start_timeout_s`` the run stops."""
    max_workers: int | None = Field(None, ge=1)
    """Workers at most, as the cluster has room for them; none means ``workers``."""
    idle_timeout_s: float | None = Field(None, gt=0)
    """A worker above ``min_workers`` that found no prompt for so long ends, so that an autoscaler
    can take its node; one is asked for again while more prompts wait than there are workers. Choose
    it longer than an iteration's learning where nodes come slowly. none: workers stay."""
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
    for equal rounding. With classifier-free guidance twice as many latents enter the network."""
    decode_batch_size: int = Field(4, ge=1)
    """Most pictures in one pass of the VAE."""
    decode_tile_above_px: int = Field(2048, ge=64)
    """Decode in tiles, with less memory, if height or width is above this."""
    compile: bool | None = None
    """Compile the network's blocks and the VAE's decoder (``torch.compile``); none: on a GPU. Where
    compiling fails, a warning is printed and the run goes on without it."""
    compile_cache: str | None = None
    """Folder of compiled code, shared by workers, ranks and runs; it may be deleted at any time.
    none: ``TORCHINDUCTOR_CACHE_DIR`` if that is set, else ``~/.cache/g2rpo_ray/compiled`` of each
    node (``XDG_CACHE_HOME``), or a temporary one of PyTorch's where that cannot be written."""
    attention: str | None = None
    """``cudnn``, ``flash``, ``efficient`` or ``math`` of PyTorch's SDPA; ``flash3`` on an H100 or
    H200 (needs g2rpo-ray[flash3]), with cuDNN for masks and where that is faster; or a backend of
    diffusers (``sage``, ``_flash_3``, ...); none: cudnn on a GPU."""
    speed: Literal["exact", "balanced", "fast"] | None = None
    """A measured way to compute completions, which estimate a reward: it sets ``fp8``,
    ``fp8_above_sigma`` and ``completion_stride``; none leaves these to you. Against the published
    order on an H200, FLUX.1-dev: ``exact`` is 2.2 times as fast; ``balanced`` 4.8 times, its
    advantages' rank correlation with exact ones inside groups 0.97 to 0.99; ``fast`` 6.1 times,
    0.95 to 0.99."""
    fp8: bool = False
    """Completions compute their matrix products from 8-bit numbers: docs/performance.md has the
    price. The anchor, whose velocities are trained on, never does."""
    fp8_above_sigma: float = Field(0.0, ge=0, lt=1)
    """Noise level above which completions use ``fp8``; up to it, where rounding shows in the
    picture most, they are exact."""
    completion_stride: int = Field(1, ge=1)
    """Above 1, completions evaluate the network at every so many steps only, on one walk of the
    schedule that serves all granularities: docs/performance.md has the price of 2 and 3. 1: every
    granularity walks its own grid."""
    timeout_s: float = Field(1800.0, gt=0)
    """A worker whose own work on a prompt takes longer counts as hanging: it is replaced, and its
    prompt goes elsewhere. Once there is a history, five times the median is enough. What it waits
    for (scores) does not count. The encoder may leave workers without a prompt for as long."""
    min_deadline_s: float = Field(60.0, gt=0)
    """Work on a prompt may take this long, whatever the history says."""
    attempts: int = Field(4, ge=1)
    """A prompt that failed on so many workers stops the run."""

    @property
    def most_workers(self) -> int:
        """Workers at most."""
        return self.workers if self.max_workers is None else self.max_workers

    def asked(self, key: str) -> str:
        """Who asked for a setting of ``SPEEDS`` that is on: for errors."""
        value = str(getattr(self, key)).lower()
        if self.speed:
            return f"rollout.speed is {self.speed}, which sets {key} to {value}"
        return f"rollout.{key} is {value}"

    @property
    def speed_in_words(self) -> str:
        """How completions are computed, by the name of that point where it has one."""
        above = self.fp8_above_sigma
        ways = ["float8 products" + f" above noise level {above:g}" * (above > 0)] * self.fp8
        if self.completion_stride > 1:
            ways.append(f"completions evaluated every {self.completion_stride} steps")
        found = {key: getattr(self, key) for key in SPEEDS["exact"]}
        name = next((name for name, settings in SPEEDS.items() if settings == found), "")
        return ": ".join(filter(None, [name, ", ".join(ways)]))

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_was(cls, tree: Any) -> Any:
        """Runs that began before December 2026 have ``thin_completions`` in their settings."""
        if not isinstance(tree, dict) or "thin_completions" not in tree:
            return tree
        if tree["thin_completions"] is not False:
            raise ValueError(
                "thin_completions is gone: leave it out and set completion_stride (2 is closer to "
                "exact completions than it was, and faster)"
            )
        return {key: value for key, value in tree.items() if key != "thin_completions"}

    @model_validator(mode="before")
    @classmethod
    def _set_speed(cls, tree: Any) -> Any:
        speed = tree.get("speed") if isinstance(tree, dict) else None
        settings = SPEEDS.get(speed, {}) if isinstance(speed, str) else {}
        for key, value in settings.items():
            if (found := tree.get(key, value)) != value:
                raise ValueError(
                    f"speed is {speed}, which sets {key} to {str(value).lower()}, and {key} is "
                    f"{str(found).lower()}: leave {key} out, or speed (speed: null)"
                )
        return settings | tree if settings else tree

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.min_workers <= self.workers <= self.most_workers:
            raise ValueError(
                f"min_workers {self.min_workers} <= workers {self.workers} <= max_workers "
                f"{self.most_workers} does not hold"
            )
        check_deadlines(self.min_deadline_s, self.timeout_s)
        if self.attention == FLASH3 and (self.compile is False or not self.gpus_per_worker):
            raise ValueError(
                f"attention is {FLASH3}, for compiled code on Hopper cards, and compile is "
                f"{str(self.compile).lower()} with gpus_per_worker {self.gpus_per_worker:g}: leave "
                "attention out, or set compile: true and gpus_per_worker above 0"
            )
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
