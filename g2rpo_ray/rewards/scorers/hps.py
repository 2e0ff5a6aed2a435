"""HPS-v2 / v2.1: human preference score, loaded and computed through open_clip."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer
from g2rpo_ray.rewards.scorers.clip_features import ClipOptions
from g2rpo_ray.rewards.scorers.open_clip_model import load_clip_features
from g2rpo_ray.rewards.scorers.preprocess import HpsPreprocess


class HpsScorer(RewardScorer):
    """Cosine of normalised features with HPSv2's own preprocessing."""

    class Options(ClipOptions):
        """Settings of the ``hps`` scorer."""

        checkpoint: str
        """``HPS_v2.1_compressed.pt`` or another file of ``{'state_dict': ...}``."""
        architecture: str = "ViT-H-14"
        """open_clip name, or ``local-dir:FOLDER`` with an open_clip_config.json."""

    kind = "hps"

    def __init__(self, options: Section, device: str) -> None:
        assert isinstance(options, self.Options)
        self._features = load_clip_features(
            options.architecture, options.checkpoint, device, options.dtype, _preprocess_of
        )

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return self._features.similarity(pictures, prompts)


def _preprocess_of(model: Any) -> HpsPreprocess:
    visual = model.visual
    return HpsPreprocess(visual.image_size[0], visual.image_mean, visual.image_std)
