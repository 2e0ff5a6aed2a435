"""A world of short words: 3 or 4 letters on 64 x 64 pixels, in Pillow's own typeface.

Each letter stands in a column of 16 pixels, as wide as one token of FLUX, so that a small model
learns to spell soon. The pen often runs dry: a third of the words are too faint for PP-OCR. The
words are those of the shipped prompt files.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from g2rpo_ray.rewards.scorers.written_text import wanted_texts
from g2rpo_ray.tiny_world import assets_dir
from g2rpo_ray.tiny_world.scene import COLOURS

LETTERS = "abcdefghijklmnopqrstuvwxyz "
SIDE, COLUMN, LONGEST = 64, 16, 4
SIZES = (22, 24, 26)
UP_OR_DOWN = 3
"""Pixels that a word may stand above or below the middle."""
FAINTEST = 0.03
"""Share of the ink's strength; PP-OCR reads what has about .12. So a model that draws as the pen
does has something to learn for every word."""
DARKER = 0.7
"""Of the colours, so that yellow on a pale ground can be read, too."""


def prompts(part: str) -> list[str]:
    """The shipped captions: those to train on (``train``), or ``heldout`` ones."""
    file = assets_dir() / "words" / "prompts" / f"{part}.txt"
    return file.read_text(encoding="utf-8").splitlines()


def codes_of(captions: Sequence[str]) -> Tensor:
    """Places of the letters in ``LETTERS``, int64 [C, 4]."""
    words = ["".join(wanted_texts(caption, None)) for caption in captions]
    return torch.tensor([[LETTERS.index(c) for c in word.ljust(LONGEST)] for word in words])


def lay_out(codes: Tensor, generator: torch.Generator) -> Tensor:
    """The codes, and what else a picture is drawn from: float32 [B, 4 + 13]."""
    return torch.cat((codes, torch.rand(len(codes), 13, generator=generator)), dim=1)


def paint(layout: Tensor) -> Tensor:
    """Pictures, uint8 [B, 64, 64, 3], where the layout is."""
    codes, u = layout[:, :LONGEST].long(), layout[:, LONGEST:]
    size = (u[:, :1] * len(SIZES)).long()
    masks = _glyphs().to(layout.device)[size, codes]
    cover = torch.zeros(len(layout), SIDE, SIDE + COLUMN, device=layout.device)
    for place, mask in enumerate(masks.unbind(dim=1)):
        cover[:, :, place * COLUMN :][:, :, : 2 * COLUMN] += mask
    cover = cover[:, :, COLUMN // 2 : -COLUMN // 2].clamp(max=1)
    down = (u[:, 1:2] * (2 * UP_OR_DOWN + 1)).long() - UP_OR_DOWN
    rows = (torch.arange(SIDE, device=layout.device) - down) % SIDE
    cover = cover.gather(1, rows[:, :, None].expand_as(cover))[..., None]
    cover = cover * FAINTEST ** u[:, 12, None, None, None]
    palette = torch.tensor(list(COLOURS.values()), device=layout.device) / 255
    ink = DARKER * palette[(u[:, 2] * len(palette)).long()] + 0.08 * u[:, 3:6]
    left, right = (0.86 + 0.13 * u[:, 6:12].unflatten(1, (2, 1, 1, 3))).unbind(1)
    across = torch.linspace(0, 1, SIDE, device=layout.device)[:, None]
    picture = torch.lerp(torch.lerp(left, right, across), ink[:, None, None], cover)
    return (picture * 255).round().to(torch.uint8)


def check(pictures: npt.NDArray[np.uint8], captions: Sequence[str]) -> npt.NDArray[np.float32]:
    """Share of a word's letters whose column is nearest to that letter as the pen draws it.

    Says how far training is where PP-OCR, the judge of this world, is not installed.
    """
    values = torch.from_numpy(pictures).float()
    ink = (values - values[:, :8].mean(dim=1, keepdim=True)).abs().sum(dim=3)
    ink = (ink / ink.flatten(1).quantile(0.97, dim=1)[:, None, None].clamp(min=1)).clamp(max=1)
    columns = ink.unflatten(2, (LONGEST, COLUMN)).transpose(1, 2).flatten(2)
    glyphs = _glyphs()[..., COLUMN // 2 : -COLUMN // 2]
    shifts = range(-UP_OR_DOWN, UP_OR_DOWN + 1)
    drawn = torch.stack([glyphs.roll(shift, dims=2) for shift in shifts]).flatten(0, 1).flatten(2)
    away = torch.cdist(columns.flatten(0, 1), drawn.flatten(0, 1)).unflatten(1, drawn.shape[:2])
    read = away.amin(dim=1).argmin(dim=1).unflatten(0, (len(values), LONGEST))
    wanted = codes_of(captions)
    letters = wanted != LETTERS.index(" ")
    right = ((read == wanted) & letters).sum(dim=1) / letters.sum(dim=1)
    return right.numpy().astype(np.float32)


@lru_cache
def _glyphs() -> Tensor:
    """Where there is ink, float32 [sizes, 27, 64, 32]: half a column more on either side."""
    masks = []
    for size in SIZES:
        font = ImageFont.load_default(size)
        for letter in LETTERS:
            mask = Image.new("L", (2 * COLUMN, SIDE))
            # Whole numbers: Pillow may cut a letter off that begins between two pixels.
            place = round(COLUMN - font.getlength(letter) / 2), SIDE // 2 + size // 3
            ImageDraw.Draw(mask).text(place, letter, fill=255, font=font, anchor="ls")
            masks.append(np.asarray(mask))
    drawn = torch.from_numpy(np.stack(masks)).float() / 255
    return drawn.unflatten(0, (len(SIZES), len(LETTERS)))
