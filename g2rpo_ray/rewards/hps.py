"""HPS-v2 / v2.1: human preference score, loaded and computed through open_clip."""

from collections.abc import Sequence

from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as transforms

from g2rpo_ray.config import Section, resolve_path
from g2rpo_ray.rewards.open_clip_model import (
    ClipSimilarity,
    load_state_dict,
    load_weights,
    resolve_architecture,
)
from g2rpo_ray.rewards.scorer import RewardScorer


class HpsScorer(RewardScorer):
    """Cosine of normalised features with HPSv2's own preprocessing."""

    class Options(Section):
        """Settings of the ``hps`` scorer."""

        checkpoint: str
        """``HPS_v2.1_compressed.pt`` or another file of ``{'state_dict': ...}``."""
        architecture: str = "ViT-H-14"
        """open_clip name, or ``local-dir:FOLDER`` with an open_clip_config.json."""

    kind = "hps"

    def __init__(self, options: Section, device: str) -> None:
        import open_clip

        assert isinstance(options, self.Options)
        name = resolve_architecture(options.architecture)
        checkpoint = resolve_path(options.checkpoint)
        state = load_state_dict(checkpoint)
        model = open_clip.create_model(name, load_weights=False)
        load_weights(model, state, checkpoint)
        self._size: int = model.visual.image_size[0]
        self._mean, self._std = model.visual.image_mean, model.visual.image_std
        self._similarity = ClipSimilarity(
            model.to(device).eval(), open_clip.get_tokenizer(name), self._preprocess
        )

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return self._similarity.score(pictures, prompts)

    def _preprocess(self, pictures: Tensor) -> Tensor:
        """HPSv2's order: to [0, 1], longest side to the model's size, zeros around, normalise."""
        images = pictures.permute(0, 3, 1, 2).float() / 255
        height, width = images.shape[-2:]
        scale = self._size / max(height, width)
        new_size = [round(height * scale), round(width * scale)]
        if new_size != [height, width]:
            images = transforms.resize(images, new_size, InterpolationMode.BICUBIC, antialias=True)
        missing_height, missing_width = self._size - new_size[0], self._size - new_size[1]
        left, top = missing_width // 2, missing_height // 2
        images = transforms.pad(images, [left, top, missing_width - left, missing_height - top])
        return transforms.normalize(images, self._mean, self._std)
