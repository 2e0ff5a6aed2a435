"""What a run folder holds, read for the report in whatever state the run is."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from g2rpo_ray.tracking.metrics import read_metrics
from g2rpo_ray.tracking.names import TrackingError


@dataclass(frozen=True)
class EvaluationPictures:
    """Pictures of one evaluation, as ``pictures/heldout/iteration_<n>.json`` lists them."""

    iteration: int
    """0 is before training."""
    folder: Path
    """Where the files named by the entries lie."""
    entries: list[dict[str, Any]]
    """``prompt_id``, ``prompt``, ``file``, ``scores`` (by reward; None: no score)."""

    def by_place(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Entries by prompt and file name, which are the same before and after training."""
        return {
            (str(entry["prompt_id"]), Path(entry["file"]).name): entry for entry in self.entries
        }


@dataclass
class RunFolder:
    """Content of a run folder; what it lacks is said in ``missing``."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[EvaluationPictures] = field(default_factory=list)
    """By iteration."""
    missing: list[str] = field(default_factory=list)

    def points(self, name: str) -> list[tuple[float, float | None]]:
        """One metric as (iteration, value) over the records that have it."""
        return [(record["iteration"], record[name]) for record in self.records if name in record]

    def total(self, name: str) -> float:
        """Sum of a metric over the run."""
        return sum(value for _, value in self.points(name) if value is not None)

    @property
    def iterations(self) -> int:
        """Iterations trained so far."""
        trained = (record["iteration"] for record in self.records if record["kind"] == "train")
        return max(trained, default=0)

    @property
    def evaluated(self) -> list[int]:
        """Iterations with an evaluation on held-out prompts."""
        return [record["iteration"] for record in self.records if record["kind"] == "evaluation"]

    @property
    def trained_rewards(self) -> set[str]:
        """Names of the rewards that are trained on."""
        rewards = self.config.get("rewards", {})
        by_config = [name for name, reward in rewards.items() if reward.get("weight", 1.0) > 0]
        return set(self.summary.get("trained_rewards", by_config))

    @property
    def rewards(self) -> list[str]:
        """Names of all rewards, those that are trained on first."""
        return self.trained_first({*self.config.get("rewards", {}), *self.heldout})

    def trained_first(self, names: Iterable[str]) -> list[str]:
        """Names of rewards, those that are trained on before the others."""
        return sorted(names, key=lambda name: (name not in self.trained_rewards, name))

    @property
    def heldout(self) -> dict[str, dict[str, float | None]]:
        """``before`` and ``after`` by reward: the summary's, else what was recorded so far."""
        if "heldout" in self.summary:
            return self.summary["heldout"]
        names = {name for record in self.records for name in record if name.startswith("heldout/")}
        scores = {}
        for name in sorted(names):
            values = [value for _, value in self.points(name)]
            after = values[-1] if len(values) > 1 else None
            scores[name.removeprefix("heldout/")] = {"before": values[0], "after": after}
        return scores


def read_run_folder(path: Path) -> RunFolder:
    """Read config.yaml, summary.json, metrics.jsonl and the lists of held-out pictures."""
    run = RunFolder(path)
    run.config = _read_mapping(
        path / "config.yaml", yaml.safe_load, "what was run is not known.", run.missing
    )
    run.summary = _read_mapping(
        path / "summary.json",
        json.loads,
        "the run still goes on, or was interrupted. Peak memory, checksum and versions are not "
        "known; everything else is what was recorded so far.",
        run.missing,
    )
    try:
        run.records = read_metrics(path)
    except TrackingError as error:
        run.missing.append(f"{error}. No curve can be drawn.")
    else:
        run.missing += _lacking_records(run)
    run.pictures = sorted(
        _read_pictures(path / "pictures" / "heldout", run.missing),
        key=lambda pictures: pictures.iteration,
    )
    if not run.pictures:
        run.missing.append("No pictures of held-out prompts were kept.")
    return run


def _read_mapping(
    path: Path, parse: Callable[[str], Any], without: str, missing: list[str]
) -> dict[str, Any]:
    if not path.exists():
        missing.append(f"There is no {path.name}: {without}")
        return {}
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        missing.append(f"{path.name} cannot be read ({error}): {without}")
        return {}
    if not isinstance(content, dict):
        missing.append(f"{path.name} holds {type(content).__name__}, not settings: {without}")
        return {}
    return content


def _lacking_records(run: RunFolder) -> Iterator[str]:
    if not run.iterations:
        yield "No training iteration was recorded: there are no curves yet."
    if not run.evaluated:
        yield "No evaluation on held-out prompts was recorded."
    elif len(run.evaluated) == 1:
        yield "Only one evaluation was recorded: there is no other to compare it with."


def _read_pictures(folder: Path, missing: list[str]) -> Iterator[EvaluationPictures]:
    for path in folder.glob("iteration_*.json"):
        try:
            iteration = int(path.stem.removeprefix("iteration_"))
            entries = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            missing.append(f"{path.name} cannot be read ({error}): its pictures are left out.")
        else:
            yield EvaluationPictures(iteration, folder, entries)
