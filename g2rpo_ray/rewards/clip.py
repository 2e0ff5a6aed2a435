"""CLIP score: text-image similarity of any open_clip model, with open_clip's preprocessing."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from g2rpo_ray.config import Section, resolve_path
from g2rpo_ray.rewards.open_clip_model import (
    LOCAL_DIR,
    ClipSimilarity,
    load_state_dict,
    load_weights,
    resolve_architecture,
)
from g2rpo_ray.rewards.scorer import RewardScorer


class ClipScorer(RewardScorer):
    """Cosine of image and caption under an open_clip model from a local folder."""

    class Options(Section):
        """Settings of the ``clip`` scorer."""

        architecture: str
        """``local-dir:FOLDER`` with open_clip_config.json and weights, or an open_clip name."""
        checkpoint: str | None = None
        """Weights file; needed with an open_clip name, else the folder's own are taken."""

    kind = "clip"

    def __init__(self, options: Section, device: str) -> None:
        import open_clip

        assert isinstance(options, self.Options)
        name = resolve_architecture(options.architecture)
        own_weights = options.checkpoint is None and name.startswith(LOCAL_DIR)
        model, _, preprocess = open_clip.create_model_and_transforms(name, load_weights=own_weights)
        if not own_weights:
            checkpoint = resolve_path(options.checkpoint or "")
            load_weights(model, load_state_dict(checkpoint), checkpoint)

        def preprocess_batch(pictures: Tensor) -> Tensor:
            return torch.stack([preprocess(Image.fromarray(p.numpy())) for p in pictures])

        tokenizer = open_clip.get_tokenizer(name)
        self._similarity = ClipSimilarity(model.to(device).eval(), tokenizer, preprocess_batch)

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return self._similarity.score(pictures, prompts)
