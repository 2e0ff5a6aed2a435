"""Endless training pictures: right ones, wrong ones and flawed ones, drawn where they are used."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from g2rpo_ray.tiny_world.scene import COLOURS, Layout
from tiny_world.hard import Patterned, spoil_pattern
from tiny_world.world import World, tiny


class PictureSource:
    """Draws batches of pictures; captions are named by their index in the world's list.

    Random numbers come from one seeded CPU generator, pixels are painted on `device`.
    """

    def __init__(self, device: torch.device, seed: int, world: World | None = None) -> None:
        """
        Args:
            world: the shipped one by default.
        """
        self.device, self.world = device, world or tiny()
        self.generator = torch.Generator().manual_seed(seed)

    def captions(self, count: int) -> Tensor:
        """Random caption indices, int64 [count] on the CPU."""
        return torch.randint(self.world.base, (count,), generator=self.generator)

    def families(self, count: int, size: int) -> Tensor:
        """Captions with near misses: int64 [count, size] on the CPU.

        The first of a family is random; each other member changes one attribute of it.
        """
        first = self.captions(count)
        near = self.world.near[first]
        chosen = torch.rand(near.shape, generator=self.generator).argsort(dim=1)[:, : size - 1]
        return torch.cat((first[:, None], near.gather(1, chosen)), dim=1)

    def draw(self, captions: Tensor) -> Tensor:
        """Right pictures of the captions, uint8 [B, side, side, 3] on the device."""
        return self.world.paint(self._layout(captions).to(self.device))

    def draw_flawed(self, captions: Tensor) -> Tensor:
        """Pictures of the captions with a flaw each, uint8 [B, side, side, 3] on the device.

        The flaws are those of a weak generator: half-way shapes, two-coloured things, a missing or
        faint thing, a thing too many, bent outlines; half-way patterns, where there are any.
        """
        return self.world.paint(_spoil(self._layout(captions), self.generator).to(self.device))

    def _layout(self, captions: Tensor) -> Layout:
        return self.world.lay_out(self.world.codes[captions], self.generator)


def _spoil(layout: Layout, generator: torch.Generator) -> Layout:
    count = len(layout.radii)
    rows = torch.arange(count)
    u = torch.rand(count, 12, generator=generator)
    flaw = torch.randint(5, (count,), generator=generator)
    there = (layout.opacity > 0).sum(dim=1)  # the first ones
    thing = (u[:, 0] * there).long()
    palette = torch.tensor(list(COLOURS.values())) / 255

    def spoiled(values: Tensor, kind: int, new: Tensor) -> Tensor:
        """The values with `new` for the chosen thing, in pictures with that kind of flaw."""
        hit = flaw == kind
        values = values.clone()
        values[rows[hit], thing[hit]] = new[hit]
        return values

    own = layout.shapes[rows, thing]
    other = torch.where(u[:, 1, None] < 0.5, own.roll(1, dims=-1), own.roll(2, dims=-1))
    share = 0.35 + 0.35 * u[:, 2, None]
    half_way = torch.lerp(own, other, share)

    random_colour = palette[(u[:, 3] * len(COLOURS)).long()]
    tones = layout.tones[rows, thing]
    neighbour = layout.tones[rows, (thing + 1) % there][:, 1]
    second_tone = torch.where(u[:, 4, None] < 0.5, neighbour, random_colour)
    two_tone = torch.stack((tones[:, 0], second_tone), dim=1)

    faint = torch.where(u[:, 5] < 0.4, torch.zeros(count), 0.15 + 0.4 * u[:, 5])

    bent = layout.wobble.clone()
    bent[:, 0] = torch.where(flaw == 3, 1.5 + 3 * u[:, 6], bent[:, 0])

    if isinstance(layout, Patterned):
        layout = spoil_pattern(layout, u[:, 10] < 0.3, generator)
        layout = replace(layout, patterns=torch.cat((layout.patterns, layout.patterns[:, :1]), 1))
    extra = flaw == 4
    return replace(
        layout,
        centres=torch.cat((layout.centres, (8 + 48 * u[:, None, 7:9])), dim=1),
        radii=torch.cat((layout.radii, 3 + 7 * u[:, 9:10]), dim=1),
        shapes=torch.cat((spoiled(layout.shapes, 0, half_way), own[:, None]), dim=1),
        tones=torch.cat(
            (spoiled(layout.tones, 1, two_tone), random_colour[:, None, None].expand(-1, 1, 2, -1)),
            dim=1,
        ),
        tilts=torch.cat((layout.tilts, layout.tilts[:, :1]), dim=1),
        opacity=torch.cat((spoiled(layout.opacity, 2, faint), extra[:, None].float()), dim=1),
        wobble=bent,
    )


def to_network(pictures: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] to float32 [B, 3, H, W] in [-1, 1], as the VAE takes it."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def to_pictures(values: Tensor) -> Tensor:
    """[B, 3, H, W] in [-1, 1] to uint8 [B, H, W, 3]."""
    return ((values.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)


def blur(values: Tensor, sigma: float, share: Tensor) -> Tensor:
    """Move each picture [B, 3, H, W] toward its Gaussian blur by a share, float [B]."""
    reach = round(3 * sigma)
    axis = torch.arange(-reach, reach + 1, device=values.device)
    line = torch.exp(-0.5 * (axis / sigma) ** 2)
    line = (line / line.sum()).expand(3, 1, -1)
    padded = F.pad(values, (reach,) * 4, mode="replicate")
    soft = F.conv2d(F.conv2d(padded, line[..., None], groups=3), line[:, :, None], groups=3)
    return torch.lerp(values, soft, share[:, None, None, None])
