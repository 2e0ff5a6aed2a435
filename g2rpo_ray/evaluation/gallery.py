"""An HTML page with every prompt's pictures side by side, sortable by score.

It shows the PNG files beside it, so that thousands of pictures load as one scrolls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from g2rpo_ray.common.files import replace_text
from g2rpo_ray.evaluation.records import Record, Records
from g2rpo_ray.evaluation.rows import Row
from g2rpo_ray.evaluation.table import Part
from g2rpo_ray.tracking.report.render import PIXELATED_BELOW, render

Means = dict[str, float | None]
"""A prompt's mean over its pictures by reward; None where a picture has no score."""


@dataclass(frozen=True)
class Drawn:
    """One prompt's pictures by one row's weights."""

    label: str
    steps: int
    files: Sequence[str]
    means: Means
    base: Means
    """Of the base model at the same steps; empty where it was not drawn."""


@dataclass(frozen=True)
class Card:
    """One prompt, as every row drew it."""

    number: int
    prompt: str
    drawn: Sequence[Drawn]

    def scores(self) -> dict[str, object]:
        """What the page sorts by: means by steps, label and reward; and the base model's."""
        scores: dict[int, dict[str, Means]] = {}
        for drawn in self.drawn:
            scores.setdefault(drawn.steps, {})[drawn.label] = drawn.means
        base = {drawn.steps: drawn.base for drawn in self.drawn if drawn.base}
        return {"id": self.number, "scores": scores, "base": base}


def write_gallery(
    path: Path, parts: Sequence[Part], rows: Sequence[Row], records: Records, columns: Sequence[str]
) -> None:
    """Write the page: ``parts`` of the table above the pictures, rewards in its order."""
    cards = list(_cards(rows, records))
    with Image.open(path.parent / cards[0].drawn[0].files[0]) as picture:
        width, height = picture.size
    page = render(
        "gallery.html",
        "g2rpo_ray.evaluation",
        name=path.parent.resolve().name,
        parts=parts,
        rewards=columns,
        steps=sorted({row.steps for row in rows}),
        labels=list(dict.fromkeys(map(_label, rows))),
        cards=cards,
        width=width,
        height=height,
        small=max(width, height) < PIXELATED_BELOW,
    )
    replace_text(path, page)


def _cards(rows: Sequence[Row], records: Records) -> Iterator[Card]:
    by_row: Mapping[str, Mapping[int, Record]] = {
        row.name: records.of_row(row.name) for row in rows
    }
    for number in sorted({number for found in by_row.values() for number in found}):
        shown = [(row, by_row[row.name][number]) for row in rows if number in by_row[row.name]]
        base = {row.steps: r.means() for row, r in shown if row.weights.checkpoint is None}
        drawn = [
            Drawn(_label(row), row.steps, record.files, record.means(), base.get(row.steps, {}))
            for row, record in shown
        ]
        yield Card(number, shown[0][1].prompt, drawn)


def _label(row: Row) -> str:
    mixed = "" if row.hybrid is None else f" (hybrid {row.hybrid:g})"
    return f"{row.weights.label}{mixed}"
