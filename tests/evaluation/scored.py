"""Pictures to score, and what g2rpo score makes of them."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config.scoring import load_scoring
from g2rpo_ray.evaluation.scoring.report import Threshold
from g2rpo_ray.evaluation.scoring.score import score

SCORERS = "tests.evaluation.scorers"


def png(level: int, size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (level, level, level)).save(file, "PNG")
    return file.getvalue()


def folder_of(folder: Path, names: Sequence[str]) -> Path:
    """Pictures of rising brightness: 0, 1/255, ..."""
    for level, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(level % 256))
    return folder


def lines_file(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def overrides(name: str, kind: str = "Brightness", **options: object) -> list[str]:
    target = json.dumps(f"{SCORERS}:{kind}")
    given = [f"rewards.{name}.options.options.{k}={json.dumps(v)}" for k, v in options.items()]
    return [f"rewards.{name}.kind=python", f"rewards.{name}.options.target={target}", *given]


def run(
    pictures: Path,
    out: Path,
    settings: Sequence[str],
    prompts: Path | None = None,
    thresholds: Sequence[Threshold] = (),
) -> tuple[dict[str, dict[str, Any]], str]:
    """Rows of scores.parquet by picture, and the report; no row may be doubled."""
    report = score(load_scoring(None, [], settings), pictures, prompts, out, thresholds)
    return rows_of(out), report


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    rows = pq.read_table(out / "scores.parquet").to_pylist()
    found = {row["picture"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def refused(*arguments: Any, **named: Any) -> str:
    with pytest.raises(InputError) as caught:
        run(*arguments, **named)
    return str(caught.value)
