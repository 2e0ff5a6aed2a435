"""HPS-v2 / v2.1: human preference score, loaded and computed through open_clip."""

from typing import Any

from g2rpo_ray.rewards.scorers.clip import ClipScorer


class HpsScorer(ClipScorer):
    """Cosine of normalised features with HPSv2's own preprocessing."""

    class Options(ClipScorer.Options):
        checkpoint: str
        """``HPS_v2.1_compressed.pt`` or another file of ``{'state_dict': ...}``."""
        architecture: str = "ViT-H-14"
        """open_clip name, or ``local-dir:FOLDER`` with an open_clip_config.json."""

    kind = "hps"

    def __init__(self, options: Options, device: str) -> None:
        from g2rpo_ray.rewards.scorers.open_clip_model import load_clip_features

        self._features = load_clip_features(
            options.architecture, options.checkpoint, device, options.dtype, _preprocess_of
        )


def _preprocess_of(model: Any) -> Any:
    from g2rpo_ray.rewards.scorers.preprocess import HpsPreprocess

    visual = model.visual
    return HpsPreprocess(visual.image_size[0], visual.image_mean, visual.image_std)
