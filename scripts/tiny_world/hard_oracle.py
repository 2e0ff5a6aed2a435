"""The harder world's oracle: by program, with credit for what is right in part.

A thing of a named colour that is there earns a quarter, and one each for shape, size and pattern. A
group earns what its best things earn, of as many as are wanted or there, whichever is more. Both
groups' shares are multiplied, halved where the relation is wrong, and each thing of a colour that
the caption does not name takes a third away. So the loss of a thing never pays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer
from g2rpo_ray.tiny_world.oracle import PALE, UNIT_AREAS, overlaps, without_specks
from g2rpo_ray.tiny_world.scene import COLOURS, SHAPES, TRIANGLE_BASE
from tiny_world.hard import DARK, PATTERNS, RADII, SIDE, Group, darkness, parse_caption

NEAR = 62.0  # a pixel this close to a colour, light or dark (RGB distance), has it
MIN_AREA = 45  # pixels of a thing; the smallest drawn one has about 140
MIN_OVERLAP = 0.72  # intersection over union with the shape
MIN_AGREEMENT = 0.68  # share of a thing's inner pixels that are light and dark as its pattern wants
LARGE = (RADII[0][1] + RADII[1][0]) / 2  # radius from which on a thing is large
UNIT = SIDE / 64  # pixels

_COLOUR_NAMES = tuple(COLOURS)
_Mask = npt.NDArray[np.bool_]


def _make_labels() -> npt.NDArray[np.uint8]:
    """Twice a colour's number, plus 1 where it is dark, by the channels' upper five bits; else
    255."""
    level = np.arange(32) * 8 + 4
    rgb = np.stack(np.meshgrid(level, level, level, indexing="ij"), axis=-1)
    light = np.array(list(COLOURS.values()))
    palette = np.stack((light, DARK * light), axis=1).reshape(-1, 3)
    distance = np.linalg.norm(rgb[..., None, :] - palette, axis=-1)
    # On the way from light to dark, too, a pixel has its colour.
    between = np.linalg.norm(rgb[..., None, :] - 0.5 * (1 + DARK) * light, axis=-1)
    labels = np.where(distance.min(axis=-1) < NEAR, distance.argmin(axis=-1), 255)
    closer = between.min(axis=-1) < np.minimum(distance.min(axis=-1), NEAR)
    dark = np.linalg.norm(rgb, axis=-1) < np.linalg.norm(
        0.5 * (1 + DARK) * light[between.argmin(axis=-1)], axis=-1
    )
    labels = np.where(closer, 2 * between.argmin(axis=-1) + dark, labels)
    labels[rgb.min(axis=-1) >= PALE] = 255
    return labels.astype(np.uint8)


_LABELS = _make_labels()


def components(mask: _Mask) -> list[_Mask]:
    """Connected parts (by edges) of at least ``MIN_AREA`` pixels, each as a mask of its own, in the
    order of their first pixels."""
    # Row by row behind each other, with a column between them that no run crosses.
    width = mask.shape[1] + 1
    flat = np.zeros((len(mask), width), np.int8)
    flat[:, :-1] = mask
    edges = np.diff(flat.ravel(), prepend=np.int8(0))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    # The runs above each that touch it lie beside each other.
    first = np.searchsorted(ends + width, starts, side="right")
    count = np.maximum(np.searchsorted(starts + width, ends, side="left") - first, 0)
    run = np.repeat(np.arange(len(starts)), count)
    above = np.arange(count.sum()) - np.repeat(count.cumsum() - count - first, count)
    part = _lowest_of_connected(len(starts), run, above)
    areas = np.bincount(part, ends - starts, minlength=len(starts))
    numbers = np.zeros(flat.size + 1, np.int64)
    numbers[starts], numbers[ends] = part + 1, -part - 1
    numbers = numbers.cumsum()[:-1].reshape(flat.shape)[:, :-1]
    return [numbers == number + 1 for number in np.flatnonzero(areas >= MIN_AREA)]


def _lowest_of_connected(
    count: int, one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """For each of ``count`` things the lowest that it is connected with, over pairs."""
    lowest = np.arange(count)
    while True:
        before = lowest.copy()
        np.minimum.at(lowest, one, before[other])
        np.minimum.at(lowest, other, before[one])
        lowest = lowest[lowest]
        if np.array_equal(lowest, before):
            return lowest


def _judge(part: _Mask, dark: _Mask, group: Group) -> tuple[float, tuple[float, float]]:
    """What a thing earns as one of the group, in [0.25, 1]; and its centre (x, y) in pixels."""
    rows, columns = np.nonzero(part)
    x, y = float(columns.mean()), float(rows.mean())
    top, left = rows.min(), columns.min()
    cut = slice(top, rows.max() + 1), slice(left, columns.max() + 1)
    inside, dark = part[cut], dark[cut]
    found = overlaps(np.pad(inside, 4), x - left + 4, y - top + 4)
    seen = int(found.argmax())
    radius = np.sqrt(part.sum() / UNIT_AREAS[seen]) / UNIT
    is_right = [
        found[seen] >= MIN_OVERLAP and SHAPES[seen] == group.shape,
        (radius >= LARGE) == (group.size == "large"),
        _pattern(inside, dark, x - left, y - top, seen, radius) == group.pattern,
    ]
    return (1 + sum(is_right)) / 4, (x, y)


def _pattern(
    inside: _Mask, dark: _Mask, x: float, y: float, shape: int, radius: float
) -> str | None:
    """The pattern that agrees best with a thing's light and dark pixels, if any does."""
    if SHAPES[shape] == "triangle":
        # Patterns are anchored at the drawing's centre, which lies above the centre of mass.
        y -= UNIT * radius * (2 * TRIANGLE_BASE - 1) / 3
    padded = np.pad(inside, 1)
    inner = inside & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    if not inner.any():
        return None
    rows, columns = np.nonzero(inner)
    wanted = darkness(
        torch.from_numpy((columns - x) / UNIT), torch.from_numpy((rows - y) / UNIT)
    ).numpy() > 0.5  # fmt: skip
    agree = (wanted == dark[inner][:, None]).mean(axis=0)
    best = int(agree.argmax())
    return PATTERNS[best] if agree[best] >= MIN_AGREEMENT else None


def _score(labels: npt.NDArray[np.uint8], caption: str) -> float:
    first, relation, second = parse_caption(caption)
    colours, dark = labels // 2, labels % 2 == 1
    parts = {
        name: components(mask)
        for number, name in enumerate(_COLOUR_NAMES)
        if (mask := without_specks(colours == number)).sum() >= MIN_AREA
    }
    foreign = sum(len(p) for n, p in parts.items() if n not in (first.colour, second.colour))
    shares, centres = [], []
    for group in (first, second):
        judged = sorted((_judge(p, dark, group) for p in parts.get(group.colour, ())), reverse=True)
        best = judged[: group.number]
        shares.append(sum(earned for earned, _ in best) / max(group.number, len(judged)))
        centres.append(np.mean([place for _, place in best], axis=0) if best else None)
    if centres[0] is None or centres[1] is None:
        return 0.0
    right, down = centres[0] - centres[1]
    horizontal = "right of" if right > 0 else "left of"
    seen = horizontal if abs(right) > abs(down) else "below" if down > 0 else "above"
    return float(shares[0] * shares[1] * (1.0 if seen == relation else 0.5) * (2 / 3) ** foreign)


def check(pictures: npt.NDArray[np.uint8], captions: Sequence[str]) -> npt.NDArray[np.float32]:
    """How much of its caption each picture shows, in [0, 1].

    Args:
        pictures: uint8 [B, 128, 128, 3].
        captions: B captions of the harder world.

    Raises:
        ValueError: pictures of another shape or dtype, or a text that is no caption of this world.
    """
    if pictures.dtype != np.uint8 or pictures.shape[1:] != (SIDE, SIDE, 3):
        raise ValueError(
            f"the oracle got pictures {pictures.dtype} {list(pictures.shape)}; "
            f"allowed: uint8 [B, {SIDE}, {SIDE}, 3]"
        )
    coarse = pictures >> 3
    labels = _LABELS[coarse[..., 0], coarse[..., 1], coarse[..., 2]]
    scores = [_score(each, caption) for each, caption in zip(labels, captions, strict=True)]
    return np.array(scores, np.float32)


class HardOracle(RewardScorer):
    """``kind: python`` with ``target: tiny_world.hard_oracle:HardOracle``; to judge by."""

    def __init__(self, options: Section, device: str) -> None:
        pass

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.from_numpy(check(pictures.numpy(), list(prompts)))
