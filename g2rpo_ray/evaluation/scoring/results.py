"""What has been scored so far, in a folder, so that it can go on after a kill.

``<out>/``: ``request.json``, ``scores.jsonl`` (a line for every few pictures), and at the end
``scores.parquet`` and ``report.md``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from g2rpo_ray.common.files import read_json_object, replace_text, replacing, whole_lines, writing
from g2rpo_ray.evaluation.scoring.pictures import Picture, ScoreError
from g2rpo_ray.evaluation.statistics import Floats

REQUEST = "request.json"
OWN_COLUMNS = ("picture", "prompt", "category", "problem")
"""Of ``scores.parquet``, beside a column for each reward."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One picture with what came of it."""

    picture: str
    stamp: str
    prompt: str | None
    category: str | None
    scores: dict[str, float]
    """By reward; those without a score are missing."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why there is none, by reward; ``""`` for all of them."""


class Results:
    """The pictures that are scored, by name."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        """Open a folder, or go on in it.

        Args:
            request: all that scores depend on; ``rewards`` has the settings of each. A folder
                takes further rewards, and no other change.

        Raises:
            ScoreError: the folder holds something else, or cannot be written.
            DiskError: the disk is full or read-only.
        """
        self.folder, self._log = folder, folder / "scores.jsonl"
        self.rows: dict[str, Scored] = {}
        with writing(folder, ScoreError, "--out"):
            self._open(json.loads(json.dumps(request)))

    def scores_of(self, picture: Picture) -> dict[str, float]:
        """By reward, what there is already; nothing where file or text has changed."""
        row = self.rows.get(picture.name)
        return row.scores if row and row.stamp == picture.stamp else {}

    def add(self, rows: Sequence[Scored]) -> None:
        """Keep some, all of them or none."""
        line = [{name: getattr(row, name) for name in Scored.__slots__} for row in rows]
        with writing(self._log), self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.rows |= {row.picture: row for row in rows}

    def write_parquet(self, rewards: Sequence[str], pictures: Sequence[str]) -> None:
        """``scores.parquet``: a row for each of ``pictures``, in their order."""
        rows = [self.rows[name] for name in pictures]
        causes = [[": ".join(filter(None, it)) for it in row.problems.items()] for row in rows]
        columns = {
            name: pa.array([getattr(row, name) for row in rows], pa.string())
            for name in ("picture", "prompt", "category")
        }
        for reward in rewards:
            columns[reward] = pa.array([row.scores.get(reward) for row in rows], pa.float64())
        columns["problem"] = pa.array(["; ".join(c) or None for c in causes], pa.string())
        with replacing(self.folder / "scores.parquet") as temporary:
            pq.write_table(pa.table(columns), temporary)

    def values(self, reward: str, pictures: Sequence[str]) -> Floats:
        """Scores ``[pictures]``; NaN where there is none."""
        found = [self.rows[name].scores.get(reward, np.nan) for name in pictures]
        return np.array(found, np.float64)

    def _open(self, request: dict[str, Any]) -> None:
        path = self.folder / REQUEST
        remedy = "remove the file, or name another --out"
        earlier = read_json_object(path, ScoreError, remedy) if path.exists() else request
        names = sorted(file.name for file in self.folder.iterdir() if file.suffix != ".tmp")
        if request.keys() != earlier.keys() or (names and REQUEST not in names):
            others = REQUEST if REQUEST in names else ", ".join(names[:3])
            raise ScoreError(
                f"--out {self.folder}: holds something else ({others}); name another folder"
            )
        self.rows |= self._read()
        if not isinstance(earlier["rewards"], dict):
            raise ScoreError(f"{path}: 'rewards' is no object; {remedy}")
        # What gave no score yet may be mended.
        scored = {name for row in self.rows.values() for name in row.scores}
        known, now = earlier["rewards"], request["rewards"]
        differing = [k for k in request if k != "rewards" and earlier[k] != request[k]]
        differing += [f"rewards.{n}" for n in now if n in scored and known[n] != now[n]]
        if scored and differing:
            raise ScoreError(
                f"--out {self.folder} was begun with other {', '.join(differing)} ({REQUEST} "
                "there has them); name another folder"
            )
        request["rewards"] = known | now
        replace_text(path, json.dumps(request, indent=1, ensure_ascii=False))

    def _read(self) -> dict[str, Scored]:
        try:
            rows = [_row(row) for line in whole_lines(self._log) for row in json.loads(line)]
        except (ValueError, TypeError, AttributeError) as error:
            raise ScoreError(f"{self._log}: not readable: {error}; remove the file") from error
        return {row.picture: row for row in rows}


def _row(told: dict[str, Any]) -> Scored:
    # Once files were known by their size, and texts not at all: scored again.
    if told.pop("size_bytes", None) is not None:
        told["stamp"] = ""
    return Scored(**told)
