"""The world: pictures of two coloured shapes, the captions that describe them, and the pen.

A caption reads "a red circle left of a blue square". The two colours differ, so there are
6 x 5 colours x 4 x 4 shapes x 4 relations = 1,920 captions. Every scene has two of them, because
"a blue square right of a red circle" says the same; `split_captions` never parts such a pair.

Drawing happens in batches and in two halves: `lay_out` turns scenes and random numbers into
geometry, `render` turns geometry into pixels on any device. `draw` is both for one scene.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 205, 30),
    "purple": (150, 50, 180),
    "cyan": (40, 190, 215),
}
SHAPES = ("circle", "square", "triangle", "cross")
RELATIONS = ("left of", "right of", "above", "below")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

SQUARE_SIDE = 0.88  # half a square's side, in radii: makes its area that of a circle
TRIANGLE_BASE = 0.8  # how far a triangle's base lies below its centre, in radii
CROSS_ARM = 0.36  # half the width of a cross's arm, in radii

_COLOUR_NAMES = tuple(COLOURS)
_CAPTION = re.compile(r"an? (\w+) (\w+) (left of|right of|above|below) an? (\w+) (\w+)")


class Thing(NamedTuple):
    """One coloured shape."""

    colour: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """Two things and where the first lies as seen from the second."""

    first: Thing
    relation: str
    second: Thing

    def __post_init__(self) -> None:
        for thing in (self.first, self.second):
            _require(thing.colour, "colour", _COLOUR_NAMES)
            _require(thing.shape, "shape", SHAPES)
        _require(self.relation, "relation", RELATIONS)
        if self.first.colour == self.second.colour:
            raise ValueError(f"both things are {self.first.colour}; their colours must differ")

    @property
    def caption(self) -> str:
        first, second = self.first, self.second
        return f"a {first.colour} {first.shape} {self.relation} a {second.colour} {second.shape}"

    @property
    def mirrored(self) -> "Scene":
        """The same scene told from the other thing's side."""
        return Scene(self.second, OPPOSITE[self.relation], self.first)

    @property
    def code(self) -> tuple[int, int, int, int, int]:
        """Indices of (first colour, first shape, relation, second colour, second shape)."""
        return (
            _COLOUR_NAMES.index(self.first.colour),
            SHAPES.index(self.first.shape),
            RELATIONS.index(self.relation),
            _COLOUR_NAMES.index(self.second.colour),
            SHAPES.index(self.second.shape),
        )


def _require(value: str, what: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}; allowed: {', '.join(allowed)}")


def parse_caption(caption: str) -> Scene:
    """Read a caption back into its scene.

    Raises:
        ValueError: the text is no caption of this world; says what is wrong and what is allowed.
    """
    match = _CAPTION.fullmatch(" ".join(caption.lower().split()))
    if match is None:
        raise ValueError(
            f"not a caption of the tiny world: {caption[:80]!r}; allowed: 'a COLOUR SHAPE RELATION "
            f"a COLOUR SHAPE' with RELATION one of {', '.join(RELATIONS)}"
        )
    colour, shape, relation, other_colour, other_shape = match.groups()
    try:
        return Scene(Thing(colour, shape), relation, Thing(other_colour, other_shape))
    except ValueError as error:
        raise ValueError(f"caption {caption[:80]!r}: {error}") from None


@lru_cache
def all_scenes() -> tuple[Scene, ...]:
    """Every scene that has a caption, in a fixed order."""
    things = [Thing(colour, shape) for colour in COLOURS for shape in SHAPES]
    return tuple(
        Scene(first, relation, second)
        for first in things
        for relation in RELATIONS
        for second in things
        if first.colour != second.colour
    )


def all_captions() -> list[str]:
    """The 1,920 captions of the world, in a fixed order."""
    return [scene.caption for scene in all_scenes()]


def split_captions(seed: int) -> tuple[list[str], list[str]]:
    """Part the captions 85/15 into (train, held-out), each in the order of `all_captions`.

    A caption and its mirrored twin show the same scene and land on the same side.
    """
    twins = [
        (scene.caption, scene.mirrored.caption)
        for scene in all_scenes()
        if scene.relation in ("left of", "above")
    ]
    order = np.random.default_rng(seed).permutation(len(twins))
    heldout = {caption for i in order[: round(0.15 * len(twins))] for caption in twins[i]}
    captions = all_captions()
    return [c for c in captions if c not in heldout], [c for c in captions if c in heldout]


@dataclass(frozen=True)
class Layout:
    """The geometry of B pictures with N things each; float32, lengths in pixels of a 64-pixel side.

    A faultless picture has one-hot shapes, equal tones, full opacity and no wobble. The other
    values exist for the flawed pictures that the reward models learn to dislike.
    """

    centres: Tensor  # [B, N, 2] x to the right, y downwards
    radii: Tensor  # [B, N]
    shapes: Tensor  # [B, N, 4] weights over SHAPES
    tones: Tensor  # [B, N, 2, 3] colour in [0, 1] at either end of the thing
    tilts: Tensor  # [B, N, 2] unit vector from the first tone to the second
    opacity: Tensor  # [B, N] in [0, 1]
    wobble: Tensor  # [B, 4] amplitude in pixels, cycles a picture, phase of x, phase of y
    ground: Tensor  # [B, 2, 3] background colour in [0, 1] at either end of the picture
    ground_tilt: Tensor  # [B, 2] unit vector from the first to the second background colour

    def to(self, device: torch.device | str) -> "Layout":
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return replace(self, **moved)


def unit_vectors(turns: Tensor) -> Tensor:
    """Angles in turns, [...], to unit vectors [..., 2]."""
    angle = 2 * torch.pi * turns
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def lay_out(codes: Tensor, generator: torch.Generator) -> Layout:
    """Place the things of B scenes at random.

    Args:
        codes: `Scene.code` of each scene, int64 [B, 5] on the CPU.
        generator: of the CPU, so that the layout does not depend on where it is rendered.
    """
    count = len(codes)
    u = torch.rand(count, 26, generator=generator)
    radii = 8.5 + 4 * u[:, :2]
    # Along the axis of the relation: margin, near thing, gap, far thing, margin.
    room = 60 - 2 * radii.sum(dim=1)
    gap = 2 + u[:, 2] * (room.clamp(max=10) - 2)
    start = 2 + u[:, 3] * (room - gap)
    relation = codes[:, 2]
    first_is_near = relation % 2 == 0  # "left of" and "above"
    near = torch.where(first_is_near, radii[:, 0], radii[:, 1])
    far = torch.where(first_is_near, radii[:, 1], radii[:, 0])
    near_at, far_at = start + near, start + 2 * near + gap + far
    along = torch.stack(
        (torch.where(first_is_near, near_at, far_at), torch.where(first_is_near, far_at, near_at)),
        dim=1,
    )
    across = 32 + 16 * (u[:, 4:6] - 0.5)
    horizontal = (relation < 2)[:, None, None]
    centres = torch.where(
        horizontal, torch.stack((along, across), dim=-1), torch.stack((across, along), dim=-1)
    )
    palette = torch.tensor(list(COLOURS.values())) / 255
    colour = palette[codes[:, [0, 3]]] + 0.08 * (u[:, 6:12].reshape(count, 2, 3) - 0.5)
    return Layout(
        centres=centres,
        radii=radii,
        shapes=torch.nn.functional.one_hot(codes[:, [1, 4]], len(SHAPES)).float(),
        tones=colour[:, :, None].expand(-1, -1, 2, -1).clamp(0, 1),
        tilts=unit_vectors(u[:, 12:14]),
        opacity=torch.ones(count, 2),
        wobble=torch.cat((torch.zeros(count, 1), u[:, 14:17]), dim=1),
        ground=0.86 + 0.13 * u[:, 17:23].reshape(count, 2, 3),
        ground_tilt=unit_vectors(u[:, 23]),
    )


def render(
    layout: Layout, size: int = 64, light: Callable[[Tensor, int], Tensor] | None = None
) -> Tensor:
    """Paint the layout, things over background in their order; uint8 [B, size, size, 3].

    Edges are smooth: a pixel's cover is its signed distance to the outline, clipped to one pixel.

    Args:
        light: how bright a thing's paint is, [B, H, W], at offsets [B, H, W, 2] from its centre;
            the thing by its number. Without it, things are plain.
    """
    device = layout.radii.device
    axis = (torch.arange(size, device=device) + 0.5) * (64 / size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    grid = torch.stack((x, y), dim=-1)  # [S, S, 2]

    ramp = torch.einsum("hwc,bc->bhw", grid / 32 - 1, layout.ground_tilt) / 2**0.5
    picture = _mix(layout.ground, (ramp + 1) / 2)

    amplitude, cycles, *phases = (layout.wobble[:, i, None, None] for i in range(4))
    waves = (
        amplitude * torch.sin(2 * torch.pi * ((1 + 3 * cycles) * other / 64 + phase))
        for other, phase in zip((y, x), phases, strict=True)
    )
    bent = grid + torch.stack(tuple(waves), dim=-1)  # [B, S, S, 2]
    for i in range(layout.radii.shape[1]):
        radius = layout.radii[:, i, None, None]
        offset = bent - layout.centres[:, i, None, None]
        distance = torch.einsum("bhws,bs->bhw", _distances(offset, radius), layout.shapes[:, i])
        cover = (0.5 - distance * (size / 64)).clamp(0, 1) * layout.opacity[:, i, None, None]
        ramp = torch.einsum("bhwc,bc->bhw", offset / radius[..., None], layout.tilts[:, i])
        paint = _mix(layout.tones[:, i], (0.5 + 2 * ramp).clamp(0, 1))
        if light is not None:
            paint = paint * light(offset, i)[..., None]
        picture = torch.lerp(picture, paint, cover[..., None])
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8)


def _mix(ends: Tensor, share: Tensor) -> Tensor:
    """Blend colours [B, 2, 3] by the second's share [B, H, W] to [B, H, W, 3]."""
    return torch.lerp(ends[:, None, None, 0], ends[:, None, None, 1], share[..., None])


def _distances(offset: Tensor, radius: Tensor) -> Tensor:
    """Signed distance to the outline of each of SHAPES, negative inside.

    Args:
        offset: from the thing's centre, [B, H, W, 2].
        radius: [B, 1, 1].

    Returns:
        [B, H, W, 4]
    """
    x, y = offset[..., 0].abs(), offset[..., 1]
    tall = y.abs()
    slope = 1 + TRIANGLE_BASE  # of a triangle's sides: this far down for one radius sideways
    arm = CROSS_ARM * radius
    return torch.stack(
        (
            torch.hypot(x, y) - radius,
            torch.maximum(x, tall) - SQUARE_SIDE * radius,
            torch.maximum(
                y - TRIANGLE_BASE * radius, (slope * x - y - radius) / (slope**2 + 1) ** 0.5
            ),
            torch.minimum(
                torch.maximum(x - radius, tall - arm), torch.maximum(x - arm, tall - radius)
            ),
        ),
        dim=-1,
    )


def draw(scene: Scene, generator: torch.Generator, size: int = 64) -> npt.NDArray[np.uint8]:
    """Draw a scene, uint8 [size, size, 3]; an equal generator state gives equal pixels."""
    picture = render(lay_out(torch.tensor([scene.code]), generator), size)[0].numpy()
    return picture.astype(np.uint8, copy=False)
