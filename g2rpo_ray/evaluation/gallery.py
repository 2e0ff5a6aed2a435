"""An HTML page with every prompt's pictures side by side, sortable by score.

It shows the PNG files beside it, so that thousands of pictures load as one scrolls.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from g2rpo_ray.common.files import replace_text
from g2rpo_ray.common.formatting import NOTHING
from g2rpo_ray.evaluation.records import Record, Records
from g2rpo_ray.evaluation.rows import Row
from g2rpo_ray.evaluation.table import Part
from g2rpo_ray.tracking.report.style import CSS

PICTURES_A_LINE = 4
"""Pictures of a prompt beside each other; more go below."""
PIXELATED_BELOW = 200
"""Pictures smaller than this are enlarged with sharp pixels instead of a blur."""


_LEAD = (
    "The n-th pictures of a prompt start from the same noise in every row. A score is the mean "
    "over the row's pictures; green is above the base model's, red below."
)


def write_gallery(
    path: Path,
    parts: Sequence[Part],
    rows: Sequence[Row],
    records: Records,
    columns: Sequence[str],
) -> None:
    """Write the page.

    Args:
        parts: of the table, shown above the pictures.
        columns: rewards in the order of the table.
    """
    by_row = {row.name: records.of_row(row.name) for row in rows}
    ids = sorted({number for found in by_row.values() for number in found})
    name = escape(path.parent.resolve().name)
    body = [
        f'<p class="soft">g2rpo-ray, evaluation</p><h1>{name}</h1>',
        *map(_table, parts),
        f'<h2>Pictures</h2><p class="lead">{_LEAD}</p>',
        _controls(rows, columns),
        f'<div id="cards"{_look(path.parent, by_row)}>',
        *(_card(rows, by_row, columns, number) for number in ids),
        "</div>",
    ]
    replace_text(
        path,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} · evaluation</title>\n<style>{CSS}{_STYLE}</style>\n</head>\n<body>\n"
        "<main>\n" + "\n".join(body) + f"\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n",
    )


def _table(part: Part) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in part.head)
    rows = "".join(
        f"<tr><th>{escape(first)}</th>" + "".join(map(_table_cell, cells))
        for first, *cells in part.cells
    )
    return (
        f'<h2>{escape(part.title)}</h2><p class="lead">{escape(part.lead)}</p><div class="sheet">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n"
    )


def _table_cell(cell: str) -> str:
    number, bracket, interval = cell.partition(" [")
    small = f'<span class="interval">[{escape(interval)}</span>' if bracket else ""
    return f"<td>{escape(number)}{small}</td>"


def _look(folder: Path, by_row: Mapping[str, Mapping[int, Record]]) -> str:
    """Attributes for the pictures' size: room is kept before they load, and pixels stay sharp."""
    record = next(record for found in by_row.values() for record in found.values())
    with Image.open(folder / record.files[0]) as picture:
        width, height = picture.size
    small = ' class="small"' if max(width, height) < PIXELATED_BELOW else ""
    return f'{small} style="--aspect: {width} / {height}"'


def _controls(rows: Sequence[Row], columns: Sequence[str]) -> str:
    steps = sorted({row.steps for row in rows})
    labels = dict.fromkeys(_label(row) for row in rows)
    orders = ['<option value="id">prompt</option>'] + [
        f'<option value="{escape(reward)}">{escape(reward)}</option>' for reward in columns
    ]
    return (
        '<form class="controls">'
        f'<label>steps <select name="steps">{_options(steps)}</select></label>'
        f'<label>sort by <select name="reward">{"".join(orders)}</select></label>'
        f'<label>of <select name="row">{_options(labels, chosen=len(labels) - 1)}</select></label>'
        '<label><select name="what"><option value="difference">difference to base</option>'
        '<option value="score">score</option></select></label>'
        '<label><select name="order"><option value="1">lowest first</option>'
        '<option value="-1">highest first</option></select></label>'
        '<label>prompts with <input name="text" type="search" placeholder="words"></label>'
        '<output name="count"></output></form>'
    )


def _options(values: Sequence[object] | Mapping[str, None], chosen: int = 0) -> str:
    return "".join(
        f'<option value="{escape(str(value))}"{" selected" * (number == chosen)}>'
        f"{escape(str(value))}</option>"
        for number, value in enumerate(values)
    )


def _card(
    rows: Sequence[Row],
    by_row: Mapping[str, Mapping[int, Record]],
    columns: Sequence[str],
    number: int,
) -> str:
    shown = [(row, by_row[row.name][number]) for row in rows if number in by_row[row.name]]
    base = {row.steps: _means(record) for row, record in shown if row.weights.checkpoint is None}
    scores: dict[str, dict[str, dict[str, float | None]]] = {}
    for row, record in shown:
        scores.setdefault(str(row.steps), {})[_label(row)] = _means(record)
    figures = "".join(_figure(row, record, columns, base.get(row.steps)) for row, record in shown)
    bases = {str(steps): means for steps, means in base.items()}
    data = escape(json.dumps({"id": number, "scores": scores, "base": bases}))
    return (
        f'<article class="card" data-scores="{data}"><h3><span class="soft">{number}</span> '
        f'<bdi>{escape(shown[0][1].prompt)}</bdi></h3><div class="rows">{figures}</div></article>\n'
    )


def _figure(
    row: Row,
    record: Record,
    columns: Sequence[str],
    base: Mapping[str, float | None] | None,
) -> str:
    pictures = "".join(
        f'<img loading="lazy" src="{escape(quote(file))}" alt="picture {number}">'
        for number, file in enumerate(record.files)
    )
    means, base = _means(record), base or {}
    cells = "".join(
        f'<tr><th>{escape(name)}</th><td class="{_way(means[name], base.get(name))}">'
        f"{_number(means[name])}</td></tr>"
        for name in columns
    )
    columns_shown = min(len(record.files), PICTURES_A_LINE)
    return (
        f'<div class="row" data-steps="{row.steps}"><span class="soft">{escape(_label(row))}</span>'
        f'<div class="pictures" style="--columns: {columns_shown}">{pictures}</div>'
        f"<table><tbody>{cells}</tbody></table></div>"
    )


def _label(row: Row) -> str:
    mixed = "" if row.hybrid is None else f" (hybrid {row.hybrid:g})"
    return f"{row.weights.label}{mixed}"


def _means(record: Record) -> dict[str, float | None]:
    """Mean over the pictures; None where one has no score."""
    return {
        name: None if None in scores else sum(s for s in scores if s is not None) / len(scores)
        for name, scores in record.scores.items()
    }


def _way(value: float | None, base: float | None) -> str:
    if value is None or base is None or value == base:
        return "same"
    return "up" if value > base else "down"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


_STYLE = """
.controls { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; position: sticky;
  top: 0; z-index: 1; padding: 10px 0; background: #f6f7f9; }
.controls select, .controls input { font: inherit; font-size: 14px; padding: 3px 6px; }
.controls output { color: var(--soft); }
.card { margin: 14px 0; padding: 14px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--paper); }
.card h3 { margin: 0 0 10px; font-size: 15px; max-height: 6lh; overflow-y: auto;
  overflow-wrap: anywhere; }
.rows { display: flex; flex-wrap: wrap; gap: 16px; }
.row { flex: 1 1 220px; max-width: 420px; }
.pictures { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: 4px; }
.pictures img { width: 100%; aspect-ratio: var(--aspect, 1); border-radius: 4px; }
.interval { display: block; color: var(--soft); font-size: 12px; white-space: nowrap; }
.small img { image-rendering: pixelated; }
.row table { width: 100%; margin-top: 6px; font-size: 13px; }
.row th { text-align: left; font-weight: 500; color: var(--soft); }
.row td { text-align: right; }
[hidden] { display: none; }
"""

_SCRIPT = """
const form = document.querySelector('form'), holder = document.getElementById('cards');
const cards = [...holder.children].map(card => ({card, ...JSON.parse(card.dataset.scores)}));
function value(item, f) {
  const score = item.scores[f.steps.value]?.[f.row.value]?.[f.reward.value] ?? null;
  if (f.what.value === 'score' || score === null) return score;
  const base = item.base[f.steps.value]?.[f.reward.value] ?? null;
  return base === null ? null : score - base;
}
function update() {
  const f = form.elements, sign = Number(f.order.value), text = f.text.value.toLowerCase();
  for (const row of holder.querySelectorAll('.row')) {
    row.hidden = row.dataset.steps !== f.steps.value;
  }
  const byId = f.reward.value === 'id';
  const keyed = cards.map(item => ({item, key: byId ? item.id : value(item, f)}));
  // Prompts without a score come last, whichever way the others are sorted.
  keyed.sort((a, b) => (a.key === null) - (b.key === null)
    || (byId ? 1 : sign) * (a.key - b.key) || a.item.id - b.item.id);
  let count = 0;
  for (const {item} of keyed) {
    const hidden = !item.card.textContent.toLowerCase().includes(text);
    item.card.hidden = hidden; count += !hidden;
    holder.append(item.card);
  }
  f.count.value = count + ' of ' + cards.length + ' prompts';
}
form.addEventListener('input', update);
form.addEventListener('submit', event => event.preventDefault());
update();
"""
