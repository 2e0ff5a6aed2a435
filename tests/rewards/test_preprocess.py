"""Device-side preprocessing against the PIL path of open_clip and transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor

from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess, to_device

SIZES = [(720, 720), (720, 480), (300, 521), (64, 64), (48, 80), (500, 300)]
"""Height and width: square, landscape, portrait, equal to the tower's size, and smaller."""


def photo_like(height: int, width: int, seed: int = 0) -> Tensor:
    """uint8 ``[H, W, 3]``: soft shapes, hard edges and noise."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    picture = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    picture[height // 3 : height // 2, width // 4 : width // 2] = generator.integers(0, 256, 3)
    picture += generator.integers(-12, 13, picture.shape)
    return torch.from_numpy(picture.clip(0, 255).astype(np.uint8))


def through_pil(picture: Tensor, preprocess: dict[str, Any]) -> Tensor:
    transform: Any = image_transform_v2(PreprocessCfg(**preprocess), is_train=False)
    result: Tensor = transform(Image.fromarray(picture.numpy()))
    return result


def grey_levels(size: int | tuple[int, int], **settings: Any) -> dict[str, Any]:
    """Normalisation that leaves grey levels, so that differences can be read."""
    return {
        "size": size, "mean": [0.0] * 3, "std": [1 / 255] * 3, "interpolation": "bicubic",
        "resize_mode": "shortest", "fill_color": 0, **settings,
    }  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        grey_levels(64),
        grey_levels(224),
        grey_levels(64, interpolation="bilinear"),
        grey_levels(64, resize_mode="squash"),
        grey_levels(64, resize_mode="longest", fill_color=128),
        grey_levels((64, 96)),
    ],
    ids=["shortest", "enlarged", "bilinear", "squash", "longest", "not square"],
)
def test_pixels_are_those_of_pil_but_for_a_few_that_round_otherwise(
    size: tuple[int, int], settings: dict[str, Any]
) -> None:
    picture = photo_like(*size)
    expected = through_pil(picture, settings)
    preprocess = ClipPreprocess.of_open_clip(settings)
    (found,) = preprocess(to_device(picture[None], torch.device("cpu")))
    assert found.shape == expected.shape
    difference = (found - expected).abs()
    # Where a weighted sum ends in half a level, and two such roundings follow each other.
    assert float(difference.max()) <= 2.001
    assert float((difference > 0.5).float().mean()) < 5e-3


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scores_differ_by_less_than_two_thousandths_from_the_pil_path(
    size: tuple[int, int],
) -> None:
    """The trained small CLIP model, on pictures unlike those that it knows, too."""
    scorer: Any = make_scorer("clip", {"architecture": "local-dir:tiny_world:clip"}, "cpu")
    pictures = torch.stack([photo_like(*size, seed) for seed in range(8)])
    prompts = ["a red circle left of a green triangle"] * 8
    found = scorer.score(pictures, prompts)
    features = scorer._features
    preprocess = features._preprocess
    cfg = grey_levels(64) | {"mean": preprocess.mean, "std": preprocess.std}
    tensors = torch.stack([through_pil(picture, cfg) for picture in pictures])
    with torch.inference_mode():
        image = torch.nn.functional.normalize(features._encode_image(tensors), dim=-1)
    expected = (image * features.text(prompts)).sum(dim=-1)
    assert float((found - expected).abs().max()) < 2e-3
    assert float(expected.std()) > 5e-3, "the pictures score alike, so this shows nothing"
