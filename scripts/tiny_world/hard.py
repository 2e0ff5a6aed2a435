"""A harder world: two groups of one to three patterned things each, on 128 x 128 pixels.

"two small striped red circles left of a large dotted blue square": number, size, pattern, colour
and shape of either group, and where the first lies. Stripes and dots are a few pixels wide, finer
than what one cell of the latents shows, so that a coarse end of a trajectory loses them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from g2rpo_ray.tiny_world.scene import COLOURS, RELATIONS, SHAPES, Layout, render, unit_vectors

NUMBERS = ((1, 2), (2, 1), (1, 3), (3, 1), (2, 2))
NUMBER_WORDS = ("a", "two", "three")
SIZES = ("small", "large")
PATTERNS = ("plain", "striped", "dotted", "checked")
SIDE = 128
RADII = ((4.2, 5.2), (7.4, 9.0))
"""Of small and large things, in units of 1/64 of the side, as all lengths here."""
DARK = 0.42
"""Brightness of a pattern's dark parts."""
STRIPE, DOT, CHECK = 3.2, 3.6, 4.6
"""Periods of the patterns."""
SCENE_SEED, TRAIN, HELDOUT = 0, 4096, 512
SLOTS = 4
_CAPTION = re.compile(
    r"(a|two|three) (\w+) (\w+) (\w+) (\w+?) (left of|right of|above|below) "
    r"(a|two|three) (\w+) (\w+) (\w+) (\w+)"
)
_OF_GROUP = (len(COLOURS), len(SHAPES), len(SIZES), len(PATTERNS))
CHOICES = (len(NUMBERS), len(RELATIONS), *_OF_GROUP, *_OF_GROUP)
"""Of a scene's code: numbers, relation, then colour, shape, size, pattern of either group."""
ATTRIBUTES = ("number", "relation", *("colour", "shape", "size", "pattern") * 2)
"""Names of a code's columns."""


@dataclass(frozen=True)
class Group:
    """Things that are alike."""

    number: int
    size: str
    pattern: str
    colour: str
    shape: str

    def __str__(self) -> str:
        plural = "" if self.number == 1 else "es" if self.shape == "cross" else "s"
        words = NUMBER_WORDS[self.number - 1], self.size, self.pattern, self.colour, self.shape
        return " ".join(words) + plural


def groups_of(code: Sequence[int]) -> tuple[Group, str, Group]:
    """What a code says: the groups, and where the first lies."""
    first, second = NUMBERS[code[0]]
    return _coded(first, code[2:6]), RELATIONS[code[1]], _coded(second, code[6:10])


def _coded(number: int, code: Sequence[int]) -> Group:
    colour, shape, size, pattern = code
    return Group(number, SIZES[size], PATTERNS[pattern], tuple(COLOURS)[colour], SHAPES[shape])


def caption_of(code: Sequence[int]) -> str:
    first, relation, second = groups_of(code)
    return f"{first} {relation} {second}"


def parse_caption(caption: str) -> tuple[Group, str, Group]:
    """Read a caption back.

    Raises:
        ValueError: it is none of this world.
    """
    match = _CAPTION.fullmatch(" ".join(caption.lower().split()))
    if match is not None:
        *first, relation, number, size, pattern, colour, shape = match.groups()
        groups = [_group(*first), _group(number, size, pattern, colour, shape)]
        if (groups[0].number, groups[1].number) in NUMBERS and caption.lower() == (
            f"{groups[0]} {relation} {groups[1]}"
        ):
            return groups[0], relation, groups[1]
    raise ValueError(
        f"not a caption of the harder world: {caption[:120]!r}; allowed: 'NUMBER SIZE PATTERN "
        "COLOUR SHAPE RELATION NUMBER SIZE PATTERN COLOUR SHAPE', such as "
        f"{caption_of((0,) * 10)!r}"
    )


def _group(number: str, size: str, pattern: str, colour: str, shape: str) -> Group:
    single = shape.removesuffix("es" if shape.startswith("cross") and shape != "cross" else "s")
    shape = shape if shape in SHAPES else single
    return Group(NUMBER_WORDS.index(number) + 1, size, pattern, colour, shape)


def sample_codes(count: int, seed: int) -> Tensor:
    """Different scenes whose groups have different colours, int64 [count, 10]."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(CHOICES, size=(2 * count + 100, len(CHOICES)))
    codes = codes[codes[:, 2] != codes[:, 6]]
    _, first = np.unique(codes, axis=0, return_index=True)
    return torch.from_numpy(codes[np.sort(first)][:count])


def words() -> list[str]:
    """Every word of a caption."""
    shapes = [f"{s}{end}" for s, end in product(SHAPES, ("", "s")) if s + end != "crosss"]
    relations = [word for relation in RELATIONS for word in relation.split()]
    return sorted({*NUMBER_WORDS, *SIZES, *PATTERNS, *COLOURS, *shapes, "crosses", *relations})


@dataclass(frozen=True)
class Patterned(Layout):
    """A layout whose things have patterns."""

    patterns: Tensor  # [B, N, 4] weights over PATTERNS


def lay_out(codes: Tensor, generator: torch.Generator) -> Patterned:
    """Place the things of B scenes at random; a group fills its half of the picture.

    Args:
        codes: int64 [B, 10] on the CPU.
    """
    count = len(codes)
    u = torch.rand(count, 6 * SLOTS + 11, generator=generator)
    along, across, size, tone, tilt = u[:, : 6 * SLOTS].split((4, 4, 4, 8, 4), dim=1)
    scene = u[:, 6 * SLOTS :]
    numbers = torch.tensor(NUMBERS)[codes[:, 0]]  # [B, 2]
    slot = torch.arange(SLOTS).expand(count, -1)
    group = (slot >= numbers[:, :1]).long()
    place = slot - group * numbers[:, :1]  # of a thing in its group
    there = place < torch.gather(numbers, 1, group)
    colour, shape, kind, pattern = (
        torch.gather(codes[:, [2 + field, 6 + field]], 1, group) for field in range(4)
    )
    least, most = torch.tensor(RADII)[kind].unbind(dim=-1)
    radii = least + (most - least) * size
    # Across the relation's axis, things share the side evenly; along it, a group has its half. The
    # groups' centres always lie further apart along it than across.
    share = 60 / torch.gather(numbers, 1, group)
    free = (share - 2 * radii - 1).clamp(0, 20)
    lie_across = 2 + share * (place + 0.5) + free * (across - 0.5)
    near = (group == 0) == (codes[:, 1:2] % 2 == 0)
    lie_along = 2 + radii + (22 - 2 * radii) * along
    lie_along = torch.where(near, lie_along, 64 - lie_along)
    horizontal = (codes[:, 1] < 2)[:, None, None]
    centres = torch.where(
        horizontal,
        torch.stack((lie_along, lie_across), dim=-1),
        torch.stack((lie_across, lie_along), dim=-1),
    )
    palette = torch.tensor(list(COLOURS.values())) / 255
    # One shade for the three channels of a thing: hues stay apart also where they are dark.
    colours = palette[colour] + 0.05 * (tone[:, :4, None] - 0.5)
    return Patterned(
        centres=centres,
        radii=radii,
        shapes=F.one_hot(shape, len(SHAPES)).float(),
        tones=colours[:, :, None].expand(-1, -1, 2, -1).clamp(0, 1),
        tilts=unit_vectors(tilt),
        opacity=there.float(),
        wobble=torch.cat((torch.zeros(count, 1), scene[:, 7:10]), dim=1),
        ground=0.86 + 0.13 * scene[:, :6].reshape(count, 2, 3),
        ground_tilt=unit_vectors(scene[:, 6]),
        patterns=F.one_hot(pattern, len(PATTERNS)).float(),
    )


def darkness(x: Tensor, y: Tensor) -> Tensor:
    """How dark each of PATTERNS is at offsets from a thing's centre: ``[..., 4]`` in [0, 1]."""

    def wave(value: Tensor, period: float) -> Tensor:
        return torch.cos(2 * torch.pi * value / period)

    stripes = (0.5 - 2 * wave(y, STRIPE)).clamp(0, 1)
    dots = (1.5 * (wave(x, DOT) + wave(y, DOT) - 0.55)).clamp(0, 1)
    checks = (0.5 + 2.5 * wave(x, 2 * CHECK / 2) * wave(y, 2 * CHECK / 2)).clamp(0, 1)
    return torch.stack((torch.zeros_like(x), stripes, dots, checks), dim=-1)


def paint(layout: Layout) -> Tensor:
    """uint8 [B, 128, 128, 3]."""
    assert isinstance(layout, Patterned)

    def light(offset: Tensor, thing: int) -> Tensor:
        dark = darkness(*offset.unbind(dim=-1))
        share = torch.einsum("bhwp,bp->bhw", dark, layout.patterns[:, thing])
        return 1 - (1 - DARK) * share

    return render(layout, SIDE, light)


def spoil_pattern(layout: Patterned, hit: Tensor, generator: torch.Generator) -> Patterned:
    """Where ``hit`` (bool [B]), every thing has a pattern half-way to another one's."""
    other = layout.patterns.roll(1 + int(torch.randint(3, (), generator=generator)), dims=-1)
    share = 0.5 + 0.5 * torch.rand(len(hit), 1, 1, generator=generator)
    return replace(
        layout,
        patterns=torch.where(
            hit[:, None, None], layout.patterns.lerp(other, share), layout.patterns
        ),
    )
