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
    SQUARE_SIDE,
    TRIANGLE_BASE,
    Scene,
    Thing,
    parse_caption,
)

# The limits leave room for what a drawn picture never shows but a good generated one may:
# soft edges, a slightly wrong hue, a few stray pixels.
NEAR = 72.0  # a pixel this close to a palette colour (RGB distance, 0..255) has that colour
PALE = 170  # a pixel whose darkest channel is at least this belongs to the background
MIN_AREA, MAX_AREA = 90, 560  # pixels of one thing at 64 x 64
MIN_OVERLAP = 0.82  # intersection over union with the shape; of drawn pictures 0.84 or more
MAX_FOREIGN = 16  # pixels of a palette colour that the caption does not name
MAX_MUDDY = 200  # pixels neither palette nor pale; soft edges make about 50, at most 165

_BACKGROUND, _MUDDY = len(COLOURS), len(COLOURS) + 1
_COLOUR_NAMES = tuple(COLOURS)
_Grid = npt.NDArray[np.float64]

# The area of each of SHAPES, in square radii.
UNIT_AREAS = np.array(
    [np.pi, (2 * SQUARE_SIDE) ** 2, 1 + TRIANGLE_BASE, 8 * CROSS_ARM - 4 * CROSS_ARM**2]
)


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


def _inside(x: _Grid, y: _Grid) -> npt.NDArray[np.bool_]:
    """Which points lie in each of SHAPES.

    Args:
        x: from the shape's centre of mass, in its radii, float [4, H, W].
        y: likewise.

    Returns:
        bool [4, H, W]
    """
    wide, tall = np.abs(x), np.abs(y)
    below = y[2] + (2 * TRIANGLE_BASE - 1) / 3  # from a triangle's drawing centre, not of mass
    return np.stack(
        (
            wide[0] ** 2 + tall[0] ** 2 <= 1,
            np.maximum(wide[1], tall[1]) <= SQUARE_SIDE,
            (below <= TRIANGLE_BASE) & ((1 + TRIANGLE_BASE) * wide[2] <= below + 1),
            (np.maximum(wide[3], tall[3]) <= 1) & (np.minimum(wide[3], tall[3]) <= CROSS_ARM),
        )
    )


def overlaps(mask: npt.NDArray[np.bool_], x: float, y: float) -> npt.NDArray[np.float64]:
    """Intersection over union with each of SHAPES at the mask's centre and of its area: [4].

    Equal areas make the comparison fair: a shape half-way between two is as far from both.
    """
    rows, columns = np.indices(mask.shape)
    radii = np.sqrt(mask.sum() / UNIT_AREAS)[:, None, None]
    templates = _inside((columns - x) / radii, (rows - y) / radii)
    shared = (templates & mask).sum(axis=(1, 2))
    return shared / (templates | mask).sum(axis=(1, 2))


def without_specks(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The mask without the pixels that have no neighbour above, below, left or right."""
    padded = np.pad(mask, 1)
    neighbour = padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]
    return mask & neighbour


def _find(labels: npt.NDArray[np.uint8], thing: Thing) -> tuple[float, float] | None:
    """Where the picture shows the thing (x and y of its centre in pixels), or None."""
    mask = without_specks(labels == _COLOUR_NAMES.index(thing.colour))
    area = int(mask.sum())
    if not MIN_AREA <= area <= MAX_AREA:
        return None
    rows, columns = np.nonzero(mask)
    x, y = float(columns.mean()), float(rows.mean())
    found = overlaps(mask, x, y)
    wanted = SHAPES.index(thing.shape)
    if found[wanted] < MIN_OVERLAP or found.argmax() != wanted:
        return None
    return x, y


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
