"""The oracle: checks by program, not by a trained model, whether a picture shows its caption.

It is the one judge of the tiny world that no policy is ever trained on: when a reward rises and
the oracle does not, the reward is being gamed.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from g2rpo_ray.tiny_world.scene import (
    COLOURS,
    CROSS_ARM,
    SHAPES,
    Scene,
    Thing,
    parse_caption,
)

# The limits leave room for what a drawn picture never shows but a good generated one may:
# soft edges, a slightly wrong hue, a few stray pixels.
NEAR = 72.0  # a pixel this close to a palette colour (RGB distance, 0..255) has that colour
PALE = 170  # a pixel whose darkest channel is at least this belongs to the background
MIN_AREA, MAX_AREA = 90, 560  # pixels of one thing at 64 x 64
MIN_OVERLAP = 0.72  # intersection over union with the shape's template
MAX_ASPECT = 1.4
MAX_FOREIGN = 16  # pixels of a palette colour that the caption does not name
MAX_MUDDY = 200  # pixels neither palette nor pale; soft edges make about 50, at most 165

_BACKGROUND, _MUDDY = len(COLOURS), len(COLOURS) + 1
_COLOUR_NAMES = tuple(COLOURS)


@lru_cache
def _labels() -> npt.NDArray[np.uint8]:
    """What a pixel counts as, by its channels' upper five bits: uint8 [32, 32, 32]."""
    level = np.arange(32) * 8 + 4
    rgb = np.stack(np.meshgrid(level, level, level, indexing="ij"), axis=-1)
    palette = np.array(list(COLOURS.values()))
    distance = np.linalg.norm(rgb[..., None, :] - palette, axis=-1)
    labels = np.where(distance.min(axis=-1) < NEAR, distance.argmin(axis=-1), _MUDDY)
    labels[rgb.min(axis=-1) >= PALE] = _BACKGROUND
    return labels.astype(np.uint8)


@lru_cache(maxsize=4096)
def _templates(height: int, width: int) -> npt.NDArray[np.bool_]:
    """Each of SHAPES filling a box of that many pixels: bool [4, height, width]."""
    y = np.abs((np.arange(height) + 0.5) / height * 2 - 1)[:, None]
    x = np.abs((np.arange(width) + 0.5) / width * 2 - 1)[None, :]
    depth = (np.arange(height)[:, None] + 0.5) / height
    square = np.ones((height, width), dtype=bool)
    return np.stack(
        (
            x**2 + y**2 <= 1,
            square,
            (x <= depth) & square,
            (x <= CROSS_ARM) | (y <= CROSS_ARM),
        )
    )


def _without_specks(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The mask without the pixels that have no neighbour above, below, left or right."""
    padded = np.pad(mask, 1)
    neighbour = padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]
    return mask & neighbour


def _find(labels: npt.NDArray[np.uint8], thing: Thing) -> tuple[float, float] | None:
    """Where the picture shows the thing (x and y of its centre in pixels), or None."""
    mask = _without_specks(labels == _COLOUR_NAMES.index(thing.colour))
    area = int(mask.sum())
    if not MIN_AREA <= area <= MAX_AREA:
        return None
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    height, width = int(bottom - top), int(right - left)
    if max(height, width) > MAX_ASPECT * min(height, width):
        return None
    templates = _templates(height, width)
    shared = (templates & mask[top:bottom, left:right]).sum(axis=(1, 2))
    overlap = shared / (templates.sum(axis=(1, 2)) + area - shared)
    wanted = SHAPES.index(thing.shape)
    if overlap[wanted] < MIN_OVERLAP or overlap.argmax() != wanted:
        return None
    return (left + right) / 2, (top + bottom) / 2


def _shows(labels: npt.NDArray[np.uint8], scene: Scene) -> bool:
    counts = np.bincount(labels.ravel(), minlength=_MUDDY + 1)
    named = {_COLOUR_NAMES.index(thing.colour) for thing in (scene.first, scene.second)}
    foreign = sum(int(counts[i]) for i in range(len(COLOURS)) if i not in named)
    if foreign > MAX_FOREIGN or counts[_MUDDY] > MAX_MUDDY:
        return False
    first, second = _find(labels, scene.first), _find(labels, scene.second)
    if first is None or second is None:
        return False
    right, down = first[0] - second[0], first[1] - second[1]
    if abs(right) > abs(down):
        return scene.relation == ("right of" if right > 0 else "left of")
    return scene.relation == ("below" if down > 0 else "above")


def check(pictures: npt.NDArray[np.uint8], captions: Sequence[str]) -> npt.NDArray[np.float32]:
    """Say for each picture whether it shows its caption and nothing else.

    Args:
        pictures: uint8 [B, 64, 64, 3].
        captions: B captions of the tiny world.

    Returns:
        float32 [B]: 1.0 where both things have their colour, shape and relation and no other
        colour is there, else 0.0.

    Raises:
        ValueError: pictures of another shape or dtype, or a text that is no caption of this world.
    """
    if pictures.dtype != np.uint8 or pictures.shape[1:] != (64, 64, 3):
        raise ValueError(
            f"the oracle got pictures {pictures.dtype} {list(pictures.shape)}; "
            "allowed: uint8 [B, 64, 64, 3]"
        )
    if len(pictures) != len(captions):
        raise ValueError(f"the oracle got {len(pictures)} pictures for {len(captions)} captions")
    coarse = pictures >> 3
    labels = _labels()[coarse[..., 0], coarse[..., 1], coarse[..., 2]]
    scenes = [parse_caption(caption) for caption in captions]
    return np.array(
        [_shows(label, scene) for label, scene in zip(labels, scenes, strict=True)],
        dtype=np.float32,
    )
