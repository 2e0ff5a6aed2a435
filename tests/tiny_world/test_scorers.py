"""The small models that scripts/build_tiny_scorers.py makes, as the scorers read them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from build_tiny_scorers import (
    CLIP,
    fit_aesthetic_head,
    scorer_options,
    to_transformers,
    train_image_reward,
    write_pickscore,
)
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict
from g2rpo_ray.rewards.scorers.image_reward import ImageRewardScorer
from g2rpo_ray.rewards.scorers.open_clip_model import load_clip_features
from g2rpo_ray.tiny_world.scene import all_captions
from tiny_world.pictures import PictureSource

COUNT = 32


@pytest.fixture(scope="module")
def source() -> PictureSource:
    return PictureSource(torch.device("cpu"), seed=5)


@pytest.fixture(scope="module")
def drawn(source: PictureSource) -> tuple[Tensor, list[str]]:
    captions = source.captions(COUNT)
    return source.draw(captions), [all_captions()[number] for number in captions]


def test_a_converted_clip_scores_as_the_one_it_was(
    drawn: tuple[Tensor, list[str]], tmp_path: Path
) -> None:
    state = load_state_dict(resolve_path("tiny_world:clip/open_clip_model.safetensors"))
    write_pickscore(tmp_path / "pickscore", to_transformers(state))
    converted = make_scorer("pickscore", scorer_options(tmp_path)["pickscore"], "cpu")
    expected = make_scorer("clip", {"architecture": CLIP}, "cpu").score(*drawn)
    torch.testing.assert_close(converted.score(*drawn), expected, rtol=0, atol=1e-5)


def test_the_aesthetic_head_likes_sound_pictures_better(
    source: PictureSource, tmp_path: Path
) -> None:
    head = fit_aesthetic_head(load_clip_features(CLIP, None, "cpu", "float32"), 0, pictures=256)
    torch.save(head, tmp_path / "aesthetic.pth")
    scorer = make_scorer("aesthetic", scorer_options(tmp_path)["aesthetic"], "cpu")
    captions = source.captions(COUNT)
    sound, flawed = (
        scorer.score(pictures, [""] * COUNT)
        for pictures in (source.draw(captions), source.draw_flawed(captions))
    )
    assert float((sound[:, None] > flawed).float().mean()) > 0.6


def test_image_reward_is_written_as_its_scorer_reads_it(
    drawn: tuple[Tensor, list[str]], tmp_path: Path
) -> None:
    share = train_image_reward(tmp_path / "image_reward", steps=2, families=2, seed=0)
    assert 0 < share < 1
    scorer = make_scorer("image_reward", scorer_options(tmp_path)["image_reward"], "cpu")
    assert isinstance(scorer, ImageRewardScorer)
    scores = scorer.score(*drawn)
    assert scores.shape == (COUNT,)
    assert bool(scores.isfinite().all())
