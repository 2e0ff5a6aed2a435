"""How pictures are drawn: sizes, steps and noise, and each algorithm's own settings."""

from typing import Literal, Self

from pydantic import Field, model_validator

from g2rpo_ray.common.section import Section
from g2rpo_ray.maths.choices import LogProbForm, SdeKind, StepChoice, WindowSchedule


class SamplingSection(Section):
    """How pictures are drawn; rollout and learner both read this one section."""

    height: int = Field(720, ge=16)
    """Picture height in pixels, a multiple of what the model packs into a token (often 16)."""
    width: int = Field(720, ge=16)
    """Picture width in pixels, likewise."""
    steps: int = Field(16, ge=2)
    """T: evaluations of one trajectory."""
    schedule: Literal["static", "dynamic"] = "static"
    """``static`` shifts by ``shift``; ``dynamic`` is the model's own, which may depend on
    the resolution: what its folder's ``scheduler_config.json`` says."""
    shift: float = Field(3.0, ge=0.01, le=100)
    """Static shift of the schedule; the papers use 3."""
    guidance: float = Field(3.5, ge=0, le=100)
    """Guidance scale, as the model's pipeline takes it: an input of FLUX.1-dev's network; of
    other models that of classifier-free guidance, two passes of the network in one evaluation. A
    distilled model takes none: 1."""
    negative_prompt: str = ""
    """Text of the second pass of classifier-free guidance."""
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
        if self.sde == "cps" and self.eta >= 2:
            raise ValueError(f"eta is {self.eta}; cps needs eta below 2 (sin(eta * pi / 2) > 0)")
        return self


class G2rpoSection(Section):
    """Singular stochastic sampling with multi-granularity completions (arXiv 2510.01982)."""

    sde_steps: list[int] = Field(default_factory=lambda: list(range(8)), min_length=1)
    """Steps k of the schedule at which noise is injected, one at a time; the last is excluded."""
    granularities: list[int] = Field(default_factory=lambda: [1, 2], min_length=1)
    """Lambda: step sizes of the completions; 1 keeps every step."""


class EGrpoSection(Section):
    """Steps of low entropy merged into one stochastic step (E-GRPO, arXiv 2601.00423)."""

    first: int = Field(8, ge=1)
    """Stochastic steps begin among the schedule's first ones, one where the one before ends."""
    entropy_threshold: float = Field(2.2, gt=0)
    """tau: a stochastic step takes in the next steps until e^h of its noise is at least this, where
    h is the entropy in nats an element: ``sqrt(2 pi e)`` times the noise's standard deviation."""


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


class DiffusionNftSection(Section):
    """Pictures by ODE, trained on their forward process (DiffusionNFT, arXiv 2509.16117).

    The policy that draws is a moving average of the one in training: its share of itself after an
    iteration is ``min(decay_rate * (updates - decay_after), decay_limit)``, and 0 before.
    """

    times_per_picture: int = Field(4, ge=1)
    """K: noise levels that a picture is trained at, of the schedule's, drawn anew for each."""
    beta: float = Field(1.0, gt=0)
    """Distance of the two implicit policies from the old one: ``v+- = (1 -+ beta) v_old +- beta
    v``. Smaller is faster and less stable."""
    adaptive_weight: bool = True
    """Weigh a picture's error by its own size, as published; else all are squared alike."""
    decay_rate: float = Field(0.001, ge=0)
    """Growth of the share for each update."""
    decay_after: int = Field(0, ge=0)
    """Updates up to which the old policy is the trained one."""
    decay_limit: float = Field(0.5, ge=0, lt=1)
    """Largest share."""

    def decay(self, updates: int) -> float:
        """The share after so many updates."""
        return min(max(0.0, self.decay_rate * (updates - self.decay_after)), self.decay_limit)


class DanceGrpoSection(FlowGrpoSection):
    """As ``flow_grpo`` with DanceGRPO's choices (arXiv 2505.07818); its stochastic step is
    ``sampling.sde: dance``."""

    trained_steps: StepChoice = "random"
    """As in ``flow_grpo``."""
    fraction: float | None = Field(0.6, gt=0, le=1)
    """As in ``flow_grpo``; none with another choice than ``random``."""
    shared_initial_noise: bool = True
    """All members of a group start from the same noise."""
