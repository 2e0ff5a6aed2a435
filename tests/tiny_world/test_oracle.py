import time

import numpy as np
import numpy.typing as npt
import pytest
import torch

from g2rpo_ray.tiny_world.oracle import check
from g2rpo_ray.tiny_world.scene import COLOURS, all_captions, parse_caption
from tiny_world.pictures import PictureSource

CAPTION = "a red circle left of a blue square"


@pytest.fixture(scope="module")
def drawn() -> tuple[npt.NDArray[np.uint8], list[str]]:
    """960 drawn pictures and their captions."""
    source = PictureSource(torch.device("cpu"), seed=11)
    index = source.captions(960)
    captions = all_captions()
    return source.draw(index).numpy(), [captions[i] for i in index]


def test_drawn_pictures_show_their_captions(drawn: tuple[npt.NDArray[np.uint8], list[str]]) -> None:
    pictures, captions = drawn
    scores = check(pictures, captions)
    assert scores.dtype == np.float32
    assert scores.mean() == 1.0


def test_drawn_pictures_do_not_show_other_captions(
    drawn: tuple[npt.NDArray[np.uint8], list[str]],
) -> None:
    pictures, captions = drawn
    order = np.random.default_rng(0).permutation(len(captions))
    assert check(pictures, [captions[i] for i in order]).mean() <= 0.005


def test_one_wrong_attribute_is_enough(drawn: tuple[npt.NDArray[np.uint8], list[str]]) -> None:
    pictures, captions = drawn
    source = PictureSource(torch.device("cpu"), seed=12)
    families = source.families(500, 2)
    near_misses = [all_captions()[i] for i in families[:, 1]]
    assert check(source.draw(families[:, 0]).numpy(), near_misses).max() == 0.0
    mirrored = [parse_caption(caption).mirrored.caption for caption in captions]
    assert check(pictures, mirrored).mean() == 1.0


@pytest.mark.parametrize("colour", [(220, 40, 40), (240, 240, 240), (0, 0, 0), (128, 128, 128)])
def test_a_solid_picture_shows_nothing(colour: tuple[int, int, int]) -> None:
    picture = np.broadcast_to(np.array(colour, dtype=np.uint8), (1, 64, 64, 3))
    assert check(picture, [CAPTION])[0] == 0.0


def test_a_third_thing_spoils_the_picture(drawn: tuple[npt.NDArray[np.uint8], list[str]]) -> None:
    pictures, captions = drawn
    scene = parse_caption(captions[0])
    named = {scene.first.colour, scene.second.colour}
    foreign = next(colour for name, colour in COLOURS.items() if name not in named)
    spoiled = pictures[:1].copy()
    spoiled[0, 1:7, 1:7] = foreign
    assert check(spoiled, captions[:1])[0] == 0.0


def test_it_judges_hundreds_of_pictures_a_second(
    drawn: tuple[npt.NDArray[np.uint8], list[str]],
) -> None:
    pictures, captions = drawn
    start = time.process_time()
    check(pictures, captions)
    assert len(pictures) / (time.process_time() - start) > 300


@pytest.mark.parametrize(
    ("pictures", "complaint"),
    [
        (np.zeros((1, 32, 32, 3), np.uint8), r"uint8 \[1, 32, 32, 3\]; allowed: uint8"),
        (np.zeros((1, 64, 64, 3), np.float32), "float32"),
        (np.zeros((2, 64, 64, 3), np.uint8), "2 pictures for 1 captions"),
    ],
)
def test_bad_input_is_refused(pictures: npt.NDArray, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check(pictures, [CAPTION])
