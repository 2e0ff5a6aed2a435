"""PickScore (arXiv 2305.01569): a transformers CLIP model trained on people's picks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers.clip import ClipOptions

if TYPE_CHECKING:
    from torch import Tensor

    from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess


class PickscoreScorer(RewardScorer):
    """Cosine of picture and caption; papers report it as it is (.23) or times about 100."""

    class Options(ClipOptions):
        path: str
        """Folder of a transformers CLIPModel, with its tokenizer and preprocessor_config.json
        (PickScore's own folder lacks the two: put those of CLIP-ViT-H-14-laion2B beside it)."""

    kind = "pickscore"

    @classmethod
    def check_files(cls, options: Options) -> None:
        from g2rpo_ray.rewards.scorers.pretrained import check_pretrained, read_tokenizer

        read_tokenizer(resolve_path(options.path), "CLIPModel")
        check_pretrained(resolve_path(options.path))

    def __init__(self, options: Options, device: str) -> None:
        import torch

        from g2rpo_ray.rewards.scorers.clip_features import DTYPES, ClipFeatures
        from g2rpo_ray.rewards.scorers.pretrained import load_pretrained, read_tokenizer

        folder = resolve_path(options.path)
        tokenizer = read_tokenizer(folder, "CLIPModel")
        model = load_pretrained(folder, "CLIPModel").to(device, DTYPES[options.dtype])
        length = model.config.text_config.max_position_embeddings

        def encode_text(prompt: str) -> Tensor:
            tokens = tokenizer(
                [prompt], padding="max_length", truncation=True, max_length=length,
                return_tensors="pt",
            ).to(device)  # fmt: skip
            ids, mask = tokens.input_ids, tokens.attention_mask
            features: Tensor = model.get_text_features(ids, attention_mask=mask).pooler_output[0]
            return features

        self._features = ClipFeatures(
            lambda images: model.get_image_features(images).pooler_output,
            encode_text,
            read_preprocess(folder / "preprocessor_config.json"),
            torch.device(device),
            DTYPES[options.dtype],
        )

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return self._features.similarity(pictures, prompts)


def read_preprocess(file: Path) -> ClipPreprocess:
    """CLIP's preprocessing from a transformers preprocessor_config.json.

    Raises:
        ScorerError: it asks for anything but bicubic resizing, a centre crop and normalisation.
    """
    from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess

    config = read_json_object(file, ScorerError)
    try:
        size, crop = config["size"], config["crop_size"]
        short = size if isinstance(size, int) else size["shortest_edge"]
        height, width = (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
        mean, std = config["image_mean"], config["image_std"]
    except (KeyError, TypeError, ValueError) as error:
        raise ScorerError(
            f"{file}: {type(error).__name__}: {error}; expected CLIP's size.shortest_edge, "
            "crop_size, image_mean and image_std"
        ) from error
    # 3 is PIL's number for bicubic.
    if short != height or height != width or config.get("resample", 3) != 3:
        raise ScorerError(
            f"{file}: size {size}, crop_size {crop}, resample {config.get('resample', 3)}; "
            "expected a bicubic resize to the side of a square crop"
        )
    return ClipPreprocess((height, width), mean, std)
