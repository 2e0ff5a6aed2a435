"""Every scorer by name: a new one is a module with a RewardScorer class and one line here."""

from typing import Any

from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer
from g2rpo_ray.rewards.scorers.aesthetic import AestheticScorer
from g2rpo_ray.rewards.scorers.clip import ClipScorer
from g2rpo_ray.rewards.scorers.composition import CompositionScorer
from g2rpo_ray.rewards.scorers.custom import PythonScorer
from g2rpo_ray.rewards.scorers.diversity import DiversityScorer
from g2rpo_ray.rewards.scorers.hps import HpsScorer
from g2rpo_ray.rewards.scorers.hpsv2 import Hpsv2Scorer
from g2rpo_ray.rewards.scorers.hpsv3 import HpsV3Scorer
from g2rpo_ray.rewards.scorers.image_reward import ImageRewardScorer
from g2rpo_ray.rewards.scorers.judge import JudgeScorer
from g2rpo_ray.rewards.scorers.ocr import OcrScorer
from g2rpo_ray.rewards.scorers.oracle import OracleScorer
from g2rpo_ray.rewards.scorers.pickscore import PickscoreScorer
from g2rpo_ray.rewards.scorers.remote import HttpScorer
from g2rpo_ray.rewards.scorers.unified_reward import UnifiedRewardScorer

SCORERS: dict[str, type[RewardScorer]] = {
    scorer.kind: scorer
    for scorer in (
        HpsScorer,
        Hpsv2Scorer,
        ClipScorer,
        PickscoreScorer,
        AestheticScorer,
        DiversityScorer,
        ImageRewardScorer,
        HpsV3Scorer,
        OcrScorer,
        CompositionScorer,
        UnifiedRewardScorer,
        JudgeScorer,
        HttpScorer,
        OracleScorer,
        PythonScorer,
    )
}


def scorer_class(kind: str) -> type[RewardScorer]:
    """The scorer of a name; raises ValueError where there is none."""
    if kind not in SCORERS:
        raise ValueError(f"no scorer {kind!r}; known are {', '.join(sorted(SCORERS))}")
    return SCORERS[kind]


def parse_options(kind: str, options: dict[str, Any]) -> Section:
    """Options of a scorer, checked.

    Raises:
        ValueError: no such scorer.
        pydantic.ValidationError: the options do not fit it.
    """
    return scorer_class(kind).Options.model_validate(options)


def check_files(kind: str, options: dict[str, Any]) -> None:
    """Look at a scorer's files without loading it; raises ScorerError, see ``RewardScorer``."""
    scorer_class(kind).check_files(parse_options(kind, options))


def make_scorer(kind: str, options: dict[str, Any], device: str) -> RewardScorer:
    """Load a scorer on a device (``cpu``, ``cuda``)."""
    return SCORERS[kind](parse_options(kind, options), device)
