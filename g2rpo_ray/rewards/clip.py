"""CLIP score: text-image similarity of any open_clip model, with open_clip's preprocessing."""

from collections.abc import Sequence
from pathlib import Path

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
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError

OWN_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""What open_clip calls the weights in a model's folder."""


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
        checkpoint = _checkpoint_of(name, options.checkpoint)
        # Not with its weights: where a folder has none, open_clip goes on with random ones.
        model, _, preprocess = open_clip.create_model_and_transforms(name, load_weights=False)
        load_weights(model, load_state_dict(checkpoint), checkpoint)

        def preprocess_batch(pictures: Tensor) -> Tensor:
            return torch.stack([preprocess(Image.fromarray(p.numpy())) for p in pictures])

        tokenizer = open_clip.get_tokenizer(name)
        self._similarity = ClipSimilarity(model.to(device).eval(), tokenizer, preprocess_batch)

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return self._similarity.score(pictures, prompts)


def _checkpoint_of(name: str, checkpoint: str | None) -> Path:
    if checkpoint is not None:
        return resolve_path(checkpoint)
    if not name.startswith(LOCAL_DIR):
        raise ScorerError(f"with architecture {name!r} the option 'checkpoint' must name a file")
    folder = Path(name.removeprefix(LOCAL_DIR))
    for file in OWN_WEIGHTS:
        if (folder / file).is_file():
            return folder / file
    raise ScorerError(f"{folder}: no weights in it; expected one of {', '.join(OWN_WEIGHTS)}")
