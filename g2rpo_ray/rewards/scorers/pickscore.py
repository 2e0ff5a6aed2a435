"""PickScore (arXiv 2305.01569): a transformers CLIP model trained on people's picks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.section import Section
from g2rpo_ray.common.tokenizers import load_tokenizer
from g2rpo_ray.common.weight_files import chosen_files, find_weights, refuse_quantiser
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers.clip import ClipOptions

if TYPE_CHECKING:
    from torch import Tensor

    from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess

PICKLED = "pytorch_model.bin"
NEEDED = ("config.json", "preprocessor_config.json", "tokenizer_config.json")


class PickscoreScorer(RewardScorer):
    """Cosine of picture and caption; papers report it as it is (.23) or times about 100."""

    class Options(ClipOptions):
        path: str
        """Folder of a transformers CLIPModel, with its tokenizer and preprocessor_config.json
        (PickScore's own folder lacks the two: put those of CLIP-ViT-H-14-laion2B beside it)."""

    kind = "pickscore"

    @classmethod
    def check_files(cls, options: Section) -> None:
        assert isinstance(options, cls.Options)
        _load_tokenizer(resolve_path(options.path))

    def __init__(self, options: Options, device: str) -> None:
        import torch

        from g2rpo_ray.rewards.scorers.clip_features import DTYPES, ClipFeatures

        folder = resolve_path(options.path)
        tokenizer = _load_tokenizer(folder)
        model = _load_model(folder).to(device, DTYPES[options.dtype]).eval()
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


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer, CLIPConfig

    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise ScorerError(f"{folder}: no {', '.join(missing)} in it (or no such folder)")
    config = read_json_object(folder / "config.json", ScorerError)
    if config.get("model_type") != "clip":
        raise ScorerError(f"{folder}/config.json: model_type is not 'clip', as a CLIPModel's is")
    try:
        rows = CLIPConfig.from_dict(config).text_config.vocab_size
    except Exception as error:  # whatever a setting of another kind makes transformers raise
        raise ScorerError(f"{folder}/config.json: no CLIPModel's: {error}") from error
    read = partial(AutoTokenizer.from_pretrained, folder, local_files_only=True)
    return load_tokenizer(read, folder, rows, ScorerError)


def _load_model(folder: Path) -> Any:
    import torch
    from transformers import CLIPModel

    from g2rpo_ray.rewards.scorers.checkpoint_file import (
        load_state_dict,
        refuse_misfits,
        refuse_quantised,
    )

    refuse_quantiser(folder / "config.json", ScorerError)
    if (folder / PICKLED).is_file() and not chosen_files(folder, "model", None):
        refuse_quantised(folder / PICKLED, load_state_dict(folder / PICKLED, "meta"))
    else:
        find_weights(folder, "model", None, ScorerError)
    try:
        model, info = CLIPModel.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, dtype=torch.float32
        )
    # Whatever a configuration or file that transformers did not expect makes it raise.
    except Exception as error:
        raise ScorerError(
            f"{folder}: cannot be loaded as a CLIPModel: {type(error).__name__}: {error}"
        ) from error
    refuse_misfits(folder, missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    return model


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
