"""Whether a run's roles fit on the cards that there are, and which settings would make them fit."""

from collections.abc import Sequence

from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import Config
from g2rpo_ray.config.files import config_from_dict, with_overrides
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.plan.prediction import Predictor

DOUBT = 0.1
"""Share by which a prediction may be wrong: whole runs held up to 5 % more than theirs."""
TURNED_DOWN = (
    ("rollout.batch_size=1", "rollout.decode_batch_size=1"),
    ("model.gradient_checkpointing=true",),
    ("learner.zero_stage=2",),
    ("learner.zero_stage=3",),
    ("learner.offload_optimizer=true",),
    ("model.share_frozen=auto",),
    ("model.frozen_dtype=float8",),
    ("sampling.height=512", "sampling.width=512"),
)
"""Tried one after another: first what changes results by rounding at most, then what changes more.
Adapters, which take least, are another training: named, not tried."""


def needed_gib(config: Config) -> tuple[str, float]:
    """Roles on the fullest card of a run, and the GiB that they need there; 0 for a run on CPUs.

    With ``rollout.batch_size: auto`` as if a batch of 1 were found.

    Raises:
        InputError: as of ``Predictor``.
    """
    if config.rollout.batch_size == "auto":
        config = _with(config, ("rollout.batch_size=1",))
    # Memory is counted alike for all cards.
    predictor = Predictor(config, load_costs(), "H100")
    return predictor.fullest_card(config.rollout.workers, config.learner.ranks)


def problem_of_cards(config: Config, cards_gib: Sequence[float]) -> tuple[str, bool]:
    """What is wrong with cards of these sizes, in words, and whether that is beyond doubt; empty
    where nothing is.

    Whichever card Ray chooses: doubt of the smallest is a warning, the largest decides.

    Raises:
        InputError: the memory cannot be predicted.
    """
    roles, gib = needed_gib(config)
    smallest, largest = min(cards_gib), max(cards_gib)
    if gib <= smallest:
        return "", False
    hopeless = gib > largest * (1 + DOUBT)
    known = f"the largest card has {largest:.1f}" if hopeless else f"a card has {smallest:.1f}"
    text = f"{roles} need {gib:.1f} GiB on one card by 'g2rpo plan', and {known}"
    return f"{text}. {_what_fits(config, largest)}", hopeless


def _what_fits(config: Config, card_gib: float) -> str:
    gib, settings = needed_gib(config)[1], list[str]()
    for overrides in TURNED_DOWN:
        try:
            changed = _with(config, overrides)
        except ConfigError:
            # Not with this run's other settings.
            continue
        less = needed_gib(changed)[1]
        if less < 0.99 * gib:
            config, gib = changed, less
            settings += overrides
        if gib <= card_gib:
            return f"By the same count this fits: {' '.join(settings)} ({gib:.1f} GiB)"
    also = "" if config.model.lora else "adapters (model.lora), "
    tried = f" even with {' '.join(settings)} it needs {gib:.1f} GiB:" if settings else ""
    return f"No setting makes it fit:{tried} take {also}fewer roles on one card, or a larger card"


def _with(config: Config, overrides: Sequence[str]) -> Config:
    return config_from_dict(with_overrides(config.model_dump(), overrides), source="plan")
