"""What an evaluation has drawn so far: pictures and scores in a folder, so that it can go on.

``<out>/``: ``request.json``, ``weights/`` (until all is drawn), ``scores.jsonl`` (a line a row and
prompt), ``pictures/<row>/``, and at the end ``scores.parquet``, ``table.parquet``, ``table.md``,
``gallery.html``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from g2rpo_ray.common.files import replace_text, replacing, whole_lines, writing
from g2rpo_ray.evaluation.rows import EvaluationError, Row
from g2rpo_ray.evaluation.statistics import Floats
from g2rpo_ray.rollout.answers import HeldoutPictures

REQUEST, PICTURES = "request.json", "pictures"


@dataclass(frozen=True)
class Record:
    """Pictures of one prompt for one row, scored."""

    row: str
    prompt_id: int
    prompt: str
    files: list[str]
    """PNG files, relative to the evaluation's folder, by picture number."""
    scores: dict[str, list[float | None]]
    """Reward name -> score of each picture; None where the scorer gave none."""

    def means(self) -> dict[str, float | None]:
        """Over the pictures, by reward; None where a picture has no score."""
        return {
            name: None if None in scores else float(np.array(scores, np.float64).mean())
            for name, scores in self.scores.items()
        }


def check_folder(folder: Path) -> None:
    """Before anything is written there.

    Raises:
        EvaluationError: the folder holds something that is no evaluation.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / REQUEST).exists():
        raise EvaluationError(
            f"{folder}: not empty and no evaluation (no {REQUEST}); name another folder with --out"
        )


def picture_files(folder: Path, rows: Iterable[str]) -> list[Path]:
    """Of these rows so far."""
    return [file for row in rows for file in (folder / PICTURES / row).glob("*.png")]


class Records:
    """The records of one evaluation's folder."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        """Open a folder, or go on in it.

        Args:
            request: what is evaluated, as plain values; ``rows`` has the weights' checksums by
                row. A folder takes further rows of the same evaluation, and no other one.

        Raises:
            EvaluationError: the folder holds another evaluation, or cannot be written.
            DiskError: the disk is full or read-only.
        """
        self.folder = folder
        self._log = folder / "scores.jsonl"
        with writing(folder, EvaluationError):
            folder.mkdir(parents=True, exist_ok=True)
            self._open(json.loads(json.dumps(request)))
        # The last line of a key counts; one that lacks a picture or a score is drawn again.
        last = {(record.row, record.prompt_id): record for record in self._read()}
        self._by_key = {key: record for key, record in last.items() if self._is_whole(record)}

    def has(self, row: str, prompt_id: int) -> bool:
        """Whether it is drawn: with all scores, or since the folder was opened."""
        return (row, prompt_id) in self._by_key

    def is_scored(self, row: str, prompt_id: int) -> bool:
        """Whether it is drawn, with all scores."""
        record = self._by_key.get((row, prompt_id))
        return record is not None and self._is_whole(record)

    def of_row(self, row: str) -> dict[int, Record]:
        """Records by prompt id."""
        return {prompt_id: r for (name, prompt_id), r in self._by_key.items() if name == row}

    def add(self, row: str, results: Sequence[HeldoutPictures]) -> None:
        """Keep pictures, then the line that says that they are whole."""
        target = self.folder / PICTURES / row
        with writing(target):
            target.mkdir(parents=True, exist_ok=True)
        for result in results:
            files = []
            for number, picture in enumerate(result.pictures):
                path = target / f"{result.prompt_id}_{number}.png"
                with replacing(path) as temporary:
                    Image.fromarray(picture.numpy()).save(temporary, "PNG")
                files.append(str(path.relative_to(self.folder)))
            scores = {
                name: [float(value) if np.isfinite(value) else None for value in values.numpy()]
                for name, values in result.scores.items()
            }
            record = Record(row, result.prompt_id, result.prompt, files, scores)
            with writing(self._log), self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
            self._by_key[row, result.prompt_id] = record

    def prompt_means(self, row: str, reward: str, prompt_ids: Sequence[int]) -> Floats:
        """Mean over a prompt's pictures ``[prompts]``; NaN where a picture has no score."""
        records = self.of_row(row)
        return np.array([records[number].means()[reward] for number in prompt_ids], np.float64)

    def write_parquet(
        self, rows: Sequence[Row], rewards: Sequence[str], categories: Mapping[int, str]
    ) -> Path:
        """``scores.parquet``: a line a picture; ``categories`` by prompt id."""
        lines = [
            {
                "row": row.name, "weights": row.weights.label, "steps": row.steps,
                "hybrid": row.hybrid, "prompt_id": record.prompt_id, "prompt": record.prompt,
                "category": categories.get(record.prompt_id), "picture": number, "file": file,
            } | {reward: record.scores[reward][number] for reward in rewards}
            for row in rows
            for _, record in sorted(self.of_row(row.name).items())
            for number, file in enumerate(record.files)
        ]  # fmt: skip
        texts = ("row", "weights", "prompt", "category", "file")
        path = self.folder / "scores.parquet"
        write_rows(path, lines, texts, counts=("steps", "prompt_id", "picture"))
        return path

    def _is_whole(self, record: Record) -> bool:
        scored = all(None not in scores for scores in record.scores.values())
        return scored and all((self.folder / file).is_file() for file in record.files)

    def _open(self, request: dict[str, Any]) -> None:
        path = self.folder / REQUEST
        if not path.exists():
            replace_text(path, json.dumps(request, indent=1, ensure_ascii=False))
            return
        try:
            # Earlier versions read no metadata, and began folders without.
            earlier = {"metadata": request.get("metadata")} | json.loads(path.read_text())
            earlier_rows = dict(earlier["rows"])
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(f"{path}: not readable: {error}; remove the folder") from error
        # Rows may be added later; one of the same name must be the same weights.
        rows = earlier_rows | request["rows"]
        # Also what was set then, and is not now.
        keys = dict.fromkeys([*request, *earlier])
        differing = [k for k in keys if k != "rows" and earlier.get(k) != request.get(k)]
        # None: the base model, in a folder of an earlier version.
        kept = earlier_rows.items()
        differing += [row for row, known in kept if known is not None and known != rows[row]]
        if differing:
            raise EvaluationError(
                f"{self.folder} holds another evaluation, with other {', '.join(differing)}; name "
                "another folder with --out"
            )
        replace_text(path, json.dumps(request | {"rows": rows}, indent=1, ensure_ascii=False))

    def _read(self) -> Iterator[Record]:
        for number, line in enumerate(whole_lines(self._log), start=1):
            try:
                yield Record(**json.loads(line.decode("utf-8")))
            except (ValueError, TypeError) as error:
                raise EvaluationError(
                    f"{self._log}, line {number}: not readable: {error}; remove the line to have "
                    "it drawn again"
                ) from error


def write_rows(
    path: Path, rows: Sequence[dict[str, Any]], texts: Sequence[str], counts: Sequence[str]
) -> None:
    """A parquet file of equal rows; what is neither a text nor a count is a float64."""
    types = dict.fromkeys(texts, pa.string()) | dict.fromkeys(counts, pa.int32())
    schema = pa.schema([(name, types.get(name, pa.float64())) for name in rows[0]])
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema), temporary)
