"""The harder world: what its oracle says of drawings, and of what is done to them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from g2rpo_ray.tiny_world import assets_dir
from tiny_world import rewards
from tiny_world.hard import (
    CHOICES,
    Patterned,
    caption_of,
    groups_of,
    lay_out,
    paint,
    parse_caption,
    sample_codes,
)
from tiny_world.hard_oracle import check
from tiny_world.measure import by_attribute
from tiny_world.pictures import PictureSource
from tiny_world.world import World, harder, scene_numbers, tiny

COUNT = 96


@pytest.fixture(scope="module")
def codes() -> Tensor:
    return sample_codes(COUNT, seed=7)


@pytest.fixture(scope="module")
def layout(codes: Tensor) -> Patterned:
    return lay_out(codes, torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def captions(codes: Tensor) -> list[str]:
    return [caption_of(tuple(code)) for code in codes.tolist()]


@pytest.fixture(scope="module")
def world() -> World:
    return harder()


def scores(layout: Patterned, captions: list[str]) -> np.ndarray:
    return check(paint(layout).numpy(), captions)


def test_drawings_show_their_captions(layout: Patterned, captions: list[str]) -> None:
    assert scores(layout, captions).mean() > 0.97


def test_drawing_is_a_function_of_the_seed(codes: Tensor) -> None:
    one, other = (paint(lay_out(codes[:8], torch.Generator().manual_seed(5))) for _ in range(2))
    assert torch.equal(one, other)


def test_captions_say_what_codes_mean(codes: Tensor, captions: list[str]) -> None:
    for code, caption in zip(codes.tolist(), captions, strict=True):
        assert parse_caption(caption) == groups_of(tuple(code))
    with pytest.raises(ValueError, match="not a caption of the harder world"):
        parse_caption("a small plain red circle left of a small plain blue circles")


def changed(layout: Patterned, what: str) -> Patterned:
    """The first thing of every picture missing, of another colour, shape, pattern or size."""
    if what == "missing":
        opacity = layout.opacity.clone()
        opacity[:, 0] = 0
        return replace(layout, opacity=opacity)
    if what == "size":
        radii = layout.radii.clone()
        radii[:, 0] = torch.where(radii[:, 0] < 6, 8.0, 4.6)
        return replace(layout, radii=radii)
    if what == "colour":
        tones = layout.tones.clone()
        tones[:, 0] = torch.tensor([220.0, 40, 40]) / 255
        return replace(layout, tones=tones)
    field = {"shape": "shapes", "pattern": "patterns"}[what]
    values = getattr(layout, field).clone()
    values[:, 0] = values[:, 0].roll(1, dims=-1)
    return replace(layout, **{field: values})


@pytest.mark.parametrize("what", ["missing", "colour", "shape", "pattern", "size"])
def test_whatever_is_wrong_with_one_thing_costs(
    layout: Patterned, captions: list[str], codes: Tensor, what: str
) -> None:
    kept = (codes[:, [2, 6]] != 0).all(dim=1).numpy()  # no red things: red is the other colour
    before, after = scores(layout, captions)[kept], scores(changed(layout, what), captions)[kept]
    assert (after <= before).all()
    assert (after < before - 0.05).mean() > 0.97


def test_credit_is_partial(layout: Patterned, captions: list[str]) -> None:
    numbers = [sum(group.number for group in parse_caption(c)[::2]) for c in captions]
    several = np.array(numbers) == 4
    after = scores(changed(layout, "pattern"), captions)[several]
    assert ((after > 0.5) & (after < 1)).mean() > 0.95
    turned = [f"{c[2]} {c[1]} {c[0]}" for c in map(parse_caption, captions)]
    assert scores(layout, turned).mean() == pytest.approx(0.5, abs=0.02)


def test_near_misses_score_less_and_mirrored_captions_are_one_scene(world: World) -> None:
    source = PictureSource(torch.device("cpu"), 4, world)
    families = source.families(COUNT, 4)
    pictures = source.draw(families[:, 0]).numpy()
    right = check(pictures, [world.captions[i] for i in families[:, 0]])
    for member in families[:, 1:].T:
        assert (check(pictures, [world.captions[i] for i in member]) < right).mean() > 0.97
    mirrored = world.codes[:5][:, [0, 1, 6, 7, 8, 9, 2, 3, 4, 5]].clone()
    mirrored[:, 1] ^= 1
    mirrored[:, 0] = torch.tensor([1, 0, 3, 2, 4])[world.codes[:5, 0]]
    assert torch.equal(scene_numbers(mirrored), world.scenes[:5])
    assert len(world.scenes[: world.base].unique()) == world.base
    assert not set(world.train) & set(world.heldout)
    assert int((world.codes.max(dim=0).values + 1 - torch.tensor(CHOICES)).abs().sum()) == 0


def test_accuracy_is_told_by_what_near_misses_change(world: World) -> None:
    """A scorer that cannot read relations is right in nearly all pairs, and by chance in those."""
    source = PictureSource(torch.device("cpu"), 5, world)
    codes, near = world.codes[source.families(2048, 2)].unbind(dim=1)
    relation = world.attributes.index("relation")
    turned = codes[:, relation] != near[:, relation]
    won = ~turned | (torch.arange(len(codes)) % 2 == 0)
    found = by_attribute(won, codes, near, world.attributes)
    assert set(found) == {"number", "relation", "colour", "shape", "size", "pattern"}
    assert found.pop("relation") == pytest.approx(0.5, abs=0.1)
    assert set(found.values()) == {1.0}
    assert float(won.float().mean()) > 0.9
    assert by_attribute(won[~turned], codes[~turned], near[~turned], world.attributes) == found


def test_flawed_pictures_score_less(world: World) -> None:
    source = PictureSource(torch.device("cpu"), 6, world)
    captions = source.captions(COUNT)
    texts = [world.captions[i] for i in captions]
    flawed = check(source.draw_flawed(captions).numpy(), texts)
    assert flawed.mean() < 0.9
    assert (flawed < 0.999).mean() > 0.6


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8 \[1, 64, 64, 3\]; allowed"):
        check(np.zeros((1, 64, 64, 3), np.uint8), ["a"])


def test_pictures_are_drawn_in_full_precision_where_networks_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a card: an autocast around the drawing gave bfloat16 shares of float32 colours."""
    monkeypatch.setattr(
        rewards, "half_precision", lambda *_: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    world = tiny()
    few = replace(world, codes=world.codes[:6], captions=world.captions[:6])
    painters = rewards.Painters(assets_dir() / "flux", Path("not asked"), torch.device("cpu"))
    pictures = rewards.TrainingPictures(few, painters, 1, seed=3)
    drawn = PictureSource(torch.device("cpu"), 3, few).draw(torch.arange(6))
    assert torch.equal(pictures._right[0], drawn)
