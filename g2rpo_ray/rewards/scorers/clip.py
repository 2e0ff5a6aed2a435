"""CLIP score: text-image similarity of any open_clip model, with open_clip's preprocessing."""

from collections.abc import Sequence
from typing import Literal

from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer, Tensor


class ClipOptions(Section):
    """Settings of every scorer with a CLIP tower."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the towers compute in; features are normalised and compared in float32."""


class ClipScorer(RewardScorer):
    """Cosine of image and caption under an open_clip model from a local folder."""

    class Options(ClipOptions):
        architecture: str
        """``local-dir:FOLDER`` with open_clip_config.json and weights, or an open_clip name."""
        checkpoint: str | None = None
        """Weights file; needed with an open_clip name, else the folder's own are taken."""

    kind = "clip"

    @classmethod
    def check_files(cls, options: Options) -> None:
        from g2rpo_ray.rewards.scorers.open_clip_model import find_open_clip

        find_open_clip(options.architecture, options.checkpoint)

    def __init__(self, options: Options, device: str) -> None:
        from g2rpo_ray.rewards.scorers.open_clip_model import load_clip_features

        self._features = load_clip_features(
            options.architecture, options.checkpoint, device, options.dtype
        )

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return self._features.similarity(pictures, prompts)
