"""The table of an evaluation, in the layout of the papers: models down, rewards across."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from g2rpo_ray.common.formatting import NOTHING
from g2rpo_ray.evaluation.records import Records, write_rows
from g2rpo_ray.evaluation.rows import Row
from g2rpo_ray.evaluation.statistics import (
    CONFIDENCE,
    RESAMPLES,
    Estimate,
    PairedDifference,
    estimate,
    paired_difference,
)
from g2rpo_ray.rewards.section import RewardSection

DIVERSITY = "diversity"
"""The column of diversity: no reward, so it is never said to be better or worse."""
MOST_CATEGORIES = 40
"""With more, a prompt file calls something else a category, and a table of it is no help."""
COLUMN_ORDER = ("hps", "hpsv2", "hpsv3", "clip", "pickscore", "image_reward", "unified_reward")
"""Kinds of scorers in the order of the paper's main table (arXiv 2510.01982)."""


@dataclass(frozen=True)
class TableRow:
    """One row with its numbers."""

    row: Row
    prompts: int
    """Prompts drawn; a cell may be over fewer where a score is missing."""
    rewards: dict[str, Estimate]
    diversity: Estimate | None
    differences: dict[str, PairedDifference] = field(default_factory=dict)
    """By reward, against the base model at the same steps; empty for the base model itself."""


def column_names(rewards: dict[str, RewardSection]) -> list[str]:
    """Rewards in the paper's order, then the others by name."""

    def place(name: str) -> tuple[int, str]:
        kind = rewards[name].kind
        return (COLUMN_ORDER.index(kind) if kind in COLUMN_ORDER else len(COLUMN_ORDER), name)

    return sorted((name for name in rewards if name != DIVERSITY), key=place)


def make_table(
    rows: Sequence[Row], records: Records, columns: Sequence[str], with_diversity: bool
) -> list[TableRow]:
    """Every number of the table, from the records."""
    base = {row.steps: row for row in rows if row.weights.checkpoint is None}
    table = []
    for row in rows:
        ids = sorted(records.of_row(row.name))
        means = {name: records.prompt_means(row.name, name, ids) for name in columns}
        diversity = (
            estimate(records.prompt_means(row.name, DIVERSITY, ids)) if with_diversity else None
        )
        differences = {}
        if row.weights.checkpoint is not None and row.steps in base:
            other = base[row.steps].name
            differences = {
                name: paired_difference(values, records.prompt_means(other, name, ids))
                for name, values in means.items()
            }
        rewards = {name: estimate(values) for name, values in means.items()}
        table.append(TableRow(row, len(ids), rewards, diversity, differences))
    return table


def write_table_parquet(table: Sequence[TableRow], path: Path) -> None:
    """A line a row and column, so that any tool can make its own table of it."""
    lines = []
    for line in table:
        cells = line.rewards | ({DIVERSITY: line.diversity} if line.diversity else {})
        for name, cell in cells.items():
            paired = line.differences.get(name)
            lines.append(
                {
                    "row": line.row.name, "weights": line.row.weights.label,
                    "training": line.row.weights.training, "steps": line.row.steps,
                    "hybrid": line.row.hybrid, "score": name, "prompts": cell.prompts,
                    "mean": cell.mean, "low": cell.low, "high": cell.high,
                    "difference": paired and paired.difference.mean,
                    "difference_low": paired and paired.difference.low,
                    "difference_high": paired and paired.difference.high,
                    "worse_share": paired and paired.worse_share,
                }
            )  # fmt: skip
    texts, counts = ("row", "weights", "training", "score"), ("steps", "prompts")
    write_rows(path, lines, texts, counts)


@dataclass(frozen=True)
class Part:
    """A grid of the table as text, for every format alike."""

    title: str
    lead: str
    head: list[str]
    cells: list[list[str]]
    words: int
    """The first so many columns hold words, the others numbers."""


def table_parts(
    table: Sequence[TableRow], columns: Sequence[str], trained: Sequence[str], protocol: str
) -> list[Part]:
    """The table for people; what belongs to no comparison stands in a part of its own.

    Args:
        trained: rewards that were trained on, which get a mark.
        protocol: how the pictures were drawn, in words.
    """
    whole = [line for line in table if line.row.hybrid is None]
    hybrid = [line for line in table if line.row.hybrid is not None]
    parts = [
        _scores("Scores", f"{protocol}. {_LEGEND}", whole, columns, trained),
        _paired("Against the base model", _DIFFERENCES, whole, columns, trained),
        _scores("Hybrid inference", _HYBRID, hybrid, columns, trained),
        _paired("Hybrid inference against the base model", "", hybrid, columns, trained),
    ]
    return [part for part in parts if part.cells]


def category_part(
    rows: Sequence[Row],
    records: Records,
    columns: Sequence[str],
    trained: Sequence[str],
    categories: Mapping[int, str],
) -> Part:
    """The scores once more, by what the prompt file says of its prompts (GenEval's ``tag``, ...).

    Args:
        categories: by prompt id; without cells where there is none, or almost as many as prompts.
    """
    names = sorted(set(categories.values()))
    cells = []
    for name in names if len(names) <= MOST_CATEGORIES else []:
        for row in (row for row in rows if row.hybrid is None):
            drawn = sorted(records.of_row(row.name))
            ids = [number for number in drawn if categories.get(number) == name]
            means = [estimate(records.prompt_means(row.name, c, ids)) for c in columns]
            numbers = [estimate_cell(mean, len(ids)) for mean in means]
            cells.append([name, row.weights.label, _steps(row), str(len(ids)), *numbers])
    head = ["category", "model", "steps", "prompts", *_headings(columns, trained)]
    return Part("By category", "", head, cells, words=2)


def markdown(parts: Sequence[Part], title: str = "Evaluation") -> str:
    """The parts as one text."""
    texts = [f"# {title}"]
    for part in parts:
        rule = ["---"] * part.words + ["---:"] * (len(part.head) - part.words)
        lines = [part.head, rule, *part.cells]
        texts += [f"## {part.title}", part.lead]
        texts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines))
    return "\n\n".join(filter(None, texts)) + "\n"


_DIFFERENCES = (
    "Paired: the same prompt from the same noise at the same number of steps, minus the base "
    "model's score. Worse is the share of prompts whose score fell."
)
_HYBRID = (
    "The named share of the steps is made by the trained weights, the rest by the base model. It "
    "hides reward hacking of the late steps, so it is no result of the training alone."
)
_LEGEND = (
    f"Intervals: {CONFIDENCE:.0%}, percentile bootstrap over prompts, {RESAMPLES:,} resamples. "
    "¹ trained on in the run that the settings come from: a rise there alone is not progress. "
    "Diversity is the mean pairwise CLIP distance of a prompt's pictures; a fall says that they "
    "became alike."
)


def _scores(
    title: str, lead: str, table: Sequence[TableRow], columns: Sequence[str], trained: Sequence[str]
) -> Part:
    with_diversity = any(line.diversity for line in table)
    head = ["model", "training", "steps", "prompts", *_headings(columns, trained)]
    cells = [
        [
            line.row.weights.label,
            line.row.weights.training,
            _steps(line.row),
            str(line.prompts),
            *(estimate_cell(line.rewards[name], line.prompts) for name in columns),
            *([estimate_cell(line.diversity, line.prompts)] if line.diversity else []),
        ]
        for line in table
    ]
    return Part(title, lead, head + [DIVERSITY] * with_diversity, cells, words=2)


def _paired(
    title: str, lead: str, table: Sequence[TableRow], columns: Sequence[str], trained: Sequence[str]
) -> Part:
    head = ["model", "steps"]
    for name in _headings(columns, trained):
        head += [f"Δ {name}", "worse"]
    cells = []
    for line in table:
        if line.differences:
            row = [line.row.weights.label, _steps(line.row)]
            for name in columns:
                paired = line.differences[name]
                share = NOTHING if np.isnan(paired.worse_share) else f"{paired.worse_share:.0%}"
                row += [estimate_cell(paired.difference, line.prompts, "+"), share]
            cells.append(row)
    return Part(title, lead, head, cells, words=1)


def _headings(columns: Sequence[str], trained: Sequence[str]) -> list[str]:
    return [f"{name}¹" if name in trained else name for name in columns]


def _steps(row: Row) -> str:
    if row.hybrid is None:
        return str(row.steps)
    return f"{row.hybrid_switch} + {row.steps - row.hybrid_switch} base"


def estimate_cell(value: Estimate, prompts: int, sign: str = "") -> str:
    if value.prompts == 0:
        return NOTHING
    text = f"{value.mean:{sign}.4f}"
    if value.prompts > 1:
        text += f" [{value.low:{sign}.4f}, {value.high:{sign}.4f}]"
    # A mean over fewer prompts than its row is not comparable without a word.
    return text if value.prompts == prompts else f"{text} (n={value.prompts})"
