"""Every setting of a run, its unit and its default, once.

A configuration is a YAML file plus dotted overrides (``learner.learning_rate=1e-4``). Unknown keys,
wrong types and impossible combinations are a :class:`ConfigError` that names file, key, value and
what is allowed; nothing is corrected silently.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from g2rpo_ray.algorithm.advantage import Normalisation
from g2rpo_ray.algorithm.objective import StepWeight
from g2rpo_ray.algorithm.sde import LogProbForm, SdeKind
from g2rpo_ray.algorithm.step_choice import StepChoice, WindowSchedule
from g2rpo_ray.errors import InputError


class ConfigError(InputError):
    """The configuration cannot be used; the message says where, what, and what is allowed."""


class Section(BaseModel):
    """A group of settings: unknown keys and loose types are errors, values cannot change later."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(64, ge=1)
    """Rank of every adapter."""
    alpha: float = Field(128.0, gt=0)
    """Adapter scale is alpha / rank."""
    target_modules: list[str] | None = None
    """Module name endings that get an adapter; none means every attention and feed-forward
    projection of FLUX's double and single blocks."""


class ModelSection(Section):
    """The policy: a FLUX-type transformer with its VAE and text encoders."""

    path: str
    """Folder in diffusers' layout (model_index.json, transformer/, vae/, text_encoder/, ...).
    ``tiny_world:flux`` is the small model inside this package."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the network computes in; latents and log-probabilities are float32 always."""
    lora: LoraSection | None = None
    """Train adapters of this shape; none trains all weights of the transformer."""
    gradient_checkpointing: bool = False
    """Recompute activations in the learner's backward pass: less memory, about a third slower."""
    truncate_timesteps: bool = False
    """Truncate sigma * 1000 to an integer as published code does; diffusers' pipeline does not."""


class PromptsSection(Section):
    """Texts to train on and to judge by."""

    train: str
    """UTF-8 text file, one prompt a line. ``tiny_world:prompts/train.txt`` is in this package."""
    heldout: str
    """Prompts for evaluation only, same format."""
    max_sequence_length: int = Field(512, ge=1)
    """Tokens of the T5 embedding."""
    max_characters: int = Field(2000, ge=1)
    """A longer prompt is refused: it is most often a broken file."""


class SamplingSection(Section):
    """How pictures are drawn; rollout and learner both read this one section."""

    height: int = Field(720, ge=16)
    """Picture height in pixels, a multiple of 16."""
    width: int = Field(720, ge=16)
    """Picture width in pixels, a multiple of 16."""
    steps: int = Field(16, ge=2)
    """T: evaluations of one trajectory."""
    schedule: Literal["static", "dynamic"] = "static"
    """``static`` shifts by ``shift``; ``dynamic`` by the resolution, as FLUX's own pipeline."""
    shift: float = Field(3.0, gt=0)
    """Static shift of the schedule; the papers use 3 for FLUX.1-dev."""
    guidance: float = Field(3.5, ge=0)
    """Value of the distilled guidance embedding."""
    sde: SdeKind = "flow"
    """Kind of the stochastic step."""
    eta: float = Field(0.7, gt=0)
    """Noise level of the stochastic step."""
    log_prob: LogProbForm = "gaussian"
    """``gaussian``, or ``squared_error`` without the variance as public CPS code has it."""
    members: int = Field(12, ge=2)
    """G: branches that share (prompt, SDE step)."""
    prompts_per_iteration: int = Field(16, ge=1)
    """Batch of an iteration, whatever the number of workers or learner ranks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("height", "width"):
            if getattr(self, key) % 16:
                raise ValueError(
                    f"{key} is {getattr(self, key)}; it must be a multiple of 16 (the VAE shrinks "
                    "by 8 and FLUX packs 2 x 2 latents into a token)"
                )
        if self.sde == "cps" and self.eta >= 2:
            raise ValueError(f"eta is {self.eta}; cps needs eta below 2 (sin(eta * pi / 2) > 0)")
        return self


class G2rpoSection(Section):
    """Singular stochastic sampling with multi-granularity completions (arXiv 2510.01982)."""

    sde_steps: list[int] = Field(default_factory=lambda: list(range(8)), min_length=1)
    """Steps k of the schedule at which noise is injected, one at a time; the last is excluded."""
    granularities: list[int] = Field(default_factory=lambda: [1, 2], min_length=1)
    """Lambda: step sizes of the completions; 1 keeps every step."""


class MixGrpoSection(Section):
    """SDE steps inside a sliding window, ODE outside (MixGRPO, arXiv 2507.21802).

    Flow-GRPO-Fast is this with ``window: 1`` or ``2`` and ``schedule: random``.
    """

    window: int = Field(4, ge=1)
    """Stochastic steps in a row; all of them are trained."""
    schedule: WindowSchedule = "progressive"
    """``progressive`` moves the window every ``shift_interval`` iterations, ``decaying`` moves it
    sooner the later its steps, ``random`` draws its place anew in every iteration."""
    shift_interval: int = Field(25, ge=1)
    """Iterations that the window stays at one place."""
    stride: int = Field(1, ge=1)
    """Steps by which the window moves."""
    decay_after: int = Field(13, ge=0)
    """``decaying``: first place from which on the window stays shorter than ``shift_interval``."""
    decay_rate: float = Field(0.1, gt=0)
    """``decaying``: exponent per step, ``shift_interval * exp(-rate * (place - decay_after))``."""
    roll_back: bool = True
    """Begin again at step 0 after the last place; else the window stays there."""
    shared_initial_noise: bool = True
    """All members of a group start from the same noise, and share the walk up to the window."""
    flash: Literal["off", "euler", "dpm_solver"] = "off"
    """MixGRPO-Flash: walk from the window to the picture in fewer steps, by Euler's method or by
    the multistep DPM-Solver++ of second order, as published."""
    flash_ratio: float = Field(0.4, gt=0, le=1)
    """Share of the steps after the window that ``flash`` keeps."""


class FlowGrpoSection(Section):
    """Every step stochastic, each member its own trajectory (Flow-GRPO, arXiv 2505.05470)."""

    trained_steps: StepChoice = "all"
    """``all`` stochastic steps, the ``first`` ones, or a ``random`` share, drawn anew in every
    iteration."""
    first: int | None = Field(None, ge=1)
    """Number of steps, with ``trained_steps: first``."""
    fraction: float | None = Field(None, gt=0, le=1)
    """Share of the stochastic steps, with ``trained_steps: random``."""
    shared_initial_noise: bool = False
    """All members of a group start from the same noise."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for choice, key in (("first", "first"), ("random", "fraction")):
            given = getattr(self, key) is not None
            if given != (self.trained_steps == choice):
                raise ValueError(
                    f"{key} is {getattr(self, key)} and trained_steps is {self.trained_steps}; "
                    f"{key} belongs to trained_steps: {choice}, and to that alone"
                )
        return self


class DanceGrpoSection(FlowGrpoSection):
    """As ``flow_grpo`` with DanceGRPO's choices (arXiv 2505.07818); its stochastic step is
    ``sampling.sde: dance``."""

    trained_steps: StepChoice = "random"
    """As in ``flow_grpo``."""
    fraction: float | None = Field(0.6, gt=0, le=1)
    """As in ``flow_grpo``; none with another choice than ``random``."""
    shared_initial_noise: bool = True
    """All members of a group start from the same noise."""


class RolloutSection(Section):
    """Ray actors that make branches and completions."""

    workers: int = Field(1, ge=1)
    """Number of rollout workers."""
    cpus_per_worker: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for a worker."""
    gpus_per_worker: float = Field(1.0, ge=0)
    """GPUs (or a fraction of one) that Ray reserves for a worker."""
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
    min_replicas: int = Field(1, ge=1)
    """Replicas kept alive."""
    max_replicas: int = Field(1, ge=1)
    """Replicas at most; Ray Serve scales between the two on load."""
    cpus_per_replica: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a replica."""
    gpus_per_replica: float = Field(0.0, ge=0)
    """GPUs (or a fraction) that Ray reserves for a replica."""
    threads: int = Field(1, ge=1)
    """Threads of a replica's process."""
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


class AdvantageSection(Section):
    """From rewards to one number per branch."""

    clamp: float = Field(5.0, gt=0)
    """The integrated advantage is cut to [-clamp, clamp]."""
    min_spread: float = Field(1e-6, ge=0)
    """A group whose standard deviation of a reward is at most this gives zero for that reward."""
    normalisation: Normalisation = "std"
    """``std`` z-scores; ``mean_only`` subtracts the group's mean and keeps the scale."""
    on_invalid: Literal["stop", "drop_group"] = "stop"
    """A NaN, infinite or missing reward stops the run, or drops its (prompt, step) and counts it.
    So does a ratio that is not finite, which leaves out its member alone."""


class LearnerSection(Section):
    """DeepSpeed ranks that turn integrated advantages into updates."""

    ranks: int = Field(1, ge=1)
    """Number of learner ranks; the update does not depend on it beyond rounding."""
    cpus_per_rank: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for a rank."""
    gpus_per_rank: float = Field(1.0, ge=0)
    """GPUs (or a fraction of one) that Ray reserves for a rank."""
    threads: int = Field(1, ge=1)
    """Threads of a rank's process."""
    zero_stage: Literal[1, 2, 3] = 2
    """DeepSpeed ZeRO stage."""
    update: Literal["per_sde_step", "per_iteration"] = "per_sde_step"
    """One optimizer step per SDE step, or one per iteration over all of them."""
    learning_rate: float = Field(2e-6, gt=0)
    """AdamW's learning rate, constant after the warm-up."""
    warmup_updates: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
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
    timeout_s: float = Field(1800.0, gt=0)
    """An update or collective that takes longer stops the run."""


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
    pictures_shown: int = Field(16, ge=0)
    """Prompts whose pictures are kept before and after, for the report."""


class CheckpointSection(Section):
    """When the state of a run is written, and how much of it is kept."""

    every: int = Field(10, ge=1)
    """Iterations between checkpoints; one more is written at the end and on a stop."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints kept; older ones are deleted after a new one is verified."""


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
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest wait for placement and for actors to load their models."""


class Config(Section):
    """One run."""

    run_dir: str
    """Folder of the run: configuration, metrics, checkpoints, pictures, report."""
    seed: int = Field(0, ge=0)
    """Seed of everything random: prompt order, initial noise, branch noise."""
    iterations: int = Field(..., ge=1)
    """Iterations to train: generate, learn, sync."""
    algorithm: Literal["g2rpo", "mix_grpo", "flow_grpo", "dance_grpo"] = "g2rpo"
    """How the rollout is made; the section of the same name has its settings."""
    model: ModelSection
    prompts: PromptsSection
    sampling: SamplingSection = SamplingSection()
    g2rpo: G2rpoSection = G2rpoSection()
    mix_grpo: MixGrpoSection = MixGrpoSection()
    flow_grpo: FlowGrpoSection = FlowGrpoSection()
    dance_grpo: DanceGrpoSection = DanceGrpoSection()
    rollout: RolloutSection = RolloutSection()
    rewards: dict[str, RewardSection] = Field(..., min_length=1)
    advantage: AdvantageSection = AdvantageSection()
    learner: LearnerSection = LearnerSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    cluster: ClusterSection = ClusterSection()

    @property
    def trained_rewards(self) -> dict[str, RewardSection]:
        """The rewards whose advantages are trained on, in a fixed order."""
        return {n: r for n, r in sorted(self.rewards.items()) if r.weight > 0}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_steps()
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
        if not self.trained_rewards:
            raise ValueError("rewards: every weight is 0; at least one reward must be trained on")
        self._check_scorers()
        return self

    def _check_steps(self) -> None:
        # Only the section in use: the others' defaults belong to longer schedules.
        steps = self.sampling.steps
        allowed = (
            f"with sampling.steps={steps} the stochastic steps are among 0 to {steps - 2} (the "
            "last step must be deterministic)"
        )
        if self.algorithm == "g2rpo":
            _require_unique("g2rpo.sde_steps", self.g2rpo.sde_steps)
            _require_unique("g2rpo.granularities", self.g2rpo.granularities)
            for granularity in self.g2rpo.granularities:
                if granularity < 1:
                    raise ValueError(f"g2rpo.granularities has {granularity}; allowed: 1 or more")
            for k in self.g2rpo.sde_steps:
                if not 0 <= k <= steps - 2:
                    raise ValueError(f"g2rpo.sde_steps has {k}; {allowed}")
        elif self.algorithm == "mix_grpo":
            if self.mix_grpo.window > steps - 1:
                raise ValueError(
                    f"mix_grpo.window is {self.mix_grpo.window}, longer than the schedule; "
                    f"{allowed}"
                )
        else:
            first = getattr(self, self.algorithm).first
            if first is not None and first > steps - 1:
                raise ValueError(f"{self.algorithm}.first is {first}; {allowed}")

    def _check_scorers(self) -> None:
        # The one place where the settings look into a room: each scorer knows its own options.
        from g2rpo_ray.rewards.registry import parse_options

        for name, reward in self.rewards.items():
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(
                    f"rewards.{name}: a reward's name may hold a-z, 0-9 and _, and starts with a "
                    "letter (it becomes a metric's name)"
                )
            try:
                parse_options(reward.kind, reward.options)
            except ValidationError as error:
                raise ValueError(f"rewards.{name}.options: {_first_problem(error)}") from error
            except ValueError as error:
                raise ValueError(f"rewards.{name}.kind: {error}") from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key.sub=value`` overrides and check everything.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, a value is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    tree = _parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected settings as 'key: value' lines, found {tree!r:.60}")
    for override in overrides:
        _apply_override(tree, override)
    return config_from_dict(tree, source=str(path))


def config_from_dict(tree: dict[str, Any], source: str) -> Config:
    """Check a tree of settings; ``source`` names it in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = "\n".join(f"  {line}" for line in _problems(error))
        raise ConfigError(f"{source}:\n{problems}") from error


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration, defaults included; ``load_config`` reads it back."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def resolve_path(path: str) -> Path:
    """Path on disk of a setting; ``tiny_world:...`` points into this package."""
    if path.startswith("tiny_world:"):
        from g2rpo_ray.tiny_world import assets_dir

        return assets_dir() / path.removeprefix("tiny_world:")
    return Path(path).expanduser().absolute()


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2 numbers (``1e-4`` is one), and a doubled key is an error instead of the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} stands here twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    *parents, leaf = key.split(".")
    section = tree
    for parent in parents:
        value = section.get(parent)
        if value is None:
            value = section[parent] = {}
        if not isinstance(value, dict):
            raise ConfigError(f"override {override!r}: {parent} is {value!r}, not a section")
        section = value
    section[leaf] = _parse_yaml(text, f"override {override!r}")


def _require_unique(key: str, values: list[int]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{key} is {values}; a value stands there twice")


def _first_problem(error: ValidationError) -> str:
    return next(iter(_problems(error)))


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key (value {problem['input']!r:.60})")
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing, it has no default")
        elif problem["type"] == "value_error":
            lines.append(f"{key}: {message}" if key else message)
        else:
            lines.append(f"{key}: {message} (got {problem['input']!r:.60})")
    return lines
