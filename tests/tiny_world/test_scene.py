import numpy as np
import pytest
import torch

from g2rpo_ray.tiny_world.scene import (
    Scene,
    Thing,
    all_captions,
    all_scenes,
    draw,
    parse_caption,
    split_captions,
)


def test_every_caption_reads_back_into_its_scene() -> None:
    assert len(set(all_captions())) == 1920
    for scene in all_scenes():
        assert parse_caption(scene.caption) == scene


def test_captions_are_read_whatever_their_case_and_spacing() -> None:
    scene = parse_caption("  A red  Circle left of a BLUE square ")
    assert scene == Scene(Thing("red", "circle"), "left of", Thing("blue", "square"))


@pytest.mark.parametrize(
    ("caption", "complaint"),
    [
        ("a cat on a mat", "not a caption of the tiny world"),
        ("", "not a caption of the tiny world"),
        ("a pink circle left of a blue square", "unknown colour 'pink'; allowed: red, green"),
        ("a red star left of a blue square", "unknown shape 'star'; allowed: circle, square"),
        ("a red circle near a blue square", "RELATION one of left of, right of, above, below"),
        ("a red circle left of a red square", "their colours must differ"),
    ],
)
def test_other_texts_are_refused_with_what_is_allowed(caption: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_caption(caption)


def test_the_split_is_fixed_complete_and_keeps_twins_together() -> None:
    train, heldout = split_captions(seed=0)
    assert (len(train), len(heldout)) == (1632, 288)
    assert sorted(train + heldout) == sorted(all_captions())
    assert (train, heldout) == split_captions(seed=0)
    assert heldout != split_captions(seed=1)[1]
    held = set(heldout)
    assert all(parse_caption(caption).mirrored.caption in held for caption in heldout)


def test_the_same_generator_state_draws_the_same_picture() -> None:
    scene = all_scenes()[7]
    first, again, other = (draw(scene, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert first.shape == (64, 64, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_larger_picture_shows_the_same_scene() -> None:
    scene = Scene(Thing("red", "circle"), "left of", Thing("blue", "square"))
    small = draw(scene, torch.Generator().manual_seed(0))
    large = draw(scene, torch.Generator().manual_seed(0), size=128)
    shrunk = large.reshape(64, 2, 64, 2, 3).mean(axis=(1, 3))
    assert np.abs(shrunk - small).mean() < 1.0  # of 255
