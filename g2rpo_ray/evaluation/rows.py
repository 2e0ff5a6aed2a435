"""What an evaluation compares: one row of the table is weights, steps, and how they are mixed."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import read_json_object, replace_text
from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.learner.checkpoints.format import (
    CheckpointInfo,
    check_whole,
    pin_weights,
    weights_checksum,
)
from g2rpo_ray.models.fingerprint import base_fingerprint
from g2rpo_ray.run.weights import read_fitting_info, while_it_is_there

BASE = "base"


class EvaluationError(InputError):
    """An evaluation cannot be made as asked; the message says what to change."""


@dataclass(frozen=True)
class Weights:
    """Weights to be judged."""

    label: str
    checkpoint: Path | None
    """None is the model folder's own weights."""
    training: str
    """How they came about, in words."""
    checksum: str = ""
    """Of the checkpoint's weights, or the base model's fingerprint."""
    told: str = ""
    """Which checkpoint it is, and what is kept of it: for who asked, once nothing is refused."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    weights: Weights
    steps: int
    hybrid: float | None = None
    """Part of the steps that these weights make; the base model makes the rest. None: all."""

    @property
    def name(self) -> str:
        """Unique, and usable as a folder's name."""
        mixed = "" if self.hybrid is None else f"-hybrid{self.hybrid:g}"
        return f"{self.weights.label}-{self.steps}steps{mixed}"

    @property
    def hybrid_switch(self) -> int:
        """Schedule index at which the base model takes over."""
        assert self.hybrid is not None
        return round(self.hybrid * self.steps)


def parse_weights(config: Config, named: Sequence[str], pins: Path) -> list[Weights]:
    """Weights from ``[LABEL=]last|best|base|PATH``; PATH is a checkpoint, or a run's folder.

    Args:
        pins: folder where they are kept under their labels: a running run deletes old checkpoints,
            and the same command goes on with the weights of its first time.

    Raises:
        EvaluationError: a label stands twice or is no label.
        CheckpointError, RunFolderError: there is no such checkpoint, or its weights are of another
            kind or base model.
    """
    sources: dict[str, str] = {}
    for text in named:
        label, equals, source = text.rpartition("=")
        label = label if equals else _label_of(source)
        # Not '..': what is kept under a label is deleted first. 'a.json' is the record of 'a'.
        if not re.fullmatch(r"[\w+-][\w.+-]*", label) or label.endswith(".json"):
            raise EvaluationError(
                f"--checkpoint {text}: the label {label!r} may hold letters, digits and . _ + -, "
                "does not begin with . and does not end with .json (it becomes a folder's name); "
                "write --checkpoint LABEL=PATH"
            )
        if label in sources:
            raise EvaluationError(
                f"--checkpoint {text}: the label {label!r} is taken; write --checkpoint LABEL=PATH"
            )
        sources[label] = source
    found = [_find(config, label, source, pins) for label, source in sources.items()]
    # The base model first: the workers hold it when they start.
    return sorted(found, key=lambda weights: weights.checkpoint is not None)


def check_steps(steps: Sequence[int], hybrids: Sequence[float]) -> None:
    """Before anything is looked at or kept.

    Raises:
        EvaluationError: steps or a hybrid share out of range, or given twice.
    """
    for count in steps:
        if count < 1:
            raise EvaluationError(f"--steps {count}: allowed are 1 or more")
    for hybrid in hybrids:
        if not math.isfinite(hybrid):
            raise EvaluationError(f"--hybrid {hybrid:g}: allowed are shares between 0 and 1")
        for count in steps:
            if not 1 <= round(hybrid * count) < count:
                raise EvaluationError(
                    f"--hybrid {hybrid:g}: of {count} steps it leaves {round(hybrid * count)} to "
                    "the trained weights; it must leave at least one to each model"
                )
    # As rows are named.
    names = [f"--steps {count}" for count in steps] + [f"--hybrid {share:g}" for share in hybrids]
    for name in names:
        if names.count(name) > 1:
            raise EvaluationError(f"{name}: it is given twice, and makes one row; name it once")


def make_rows(
    all_weights: Sequence[Weights], steps: Sequence[int], hybrids: Sequence[float]
) -> list[Row]:
    """Every combination, after ``check_steps``; hybrid rows for trained weights only."""
    trained = [weights for weights in all_weights if weights.checkpoint is not None]
    return [Row(weights, count) for weights in all_weights for count in steps] + [
        Row(weights, count, hybrid) for hybrid in hybrids for weights in trained for count in steps
    ]


def _label_of(source: str) -> str:
    # A run's folder says more than 'iteration_000080'; both together name a checkpoint.
    path = Path(os.path.normpath(Path(source).expanduser().absolute()))
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    return path.name


def _find(config: Config, label: str, source: str, pins: Path) -> Weights:
    if source == BASE:
        return Weights(label, None, "none", base_fingerprint(config.model))
    pin, record = pins / label, pins / f"{label}.json"
    if record.is_file():
        remedy = "remove the file"
        known = read_json_object(record, EvaluationError, remedy)
        if missing := {"source", "checkpoint", "checksum", "training"} - known.keys():
            raise EvaluationError(f"{record}: {', '.join(sorted(missing))} missing; {remedy}")
        if known["source"] == source:
            path = Path(known["checkpoint"])
            _keep(path, pin, known["checksum"])
            told = f"{label}: {path}, as when this evaluation began (another --out: as of now)"
            return Weights(label, pin, known["training"], known["checksum"], told)
        raise EvaluationError(
            f"--checkpoint {label}={source}: in {pins.parent} the label is of {known['source']}; "
            "write --checkpoint OTHER_LABEL=..., or name another folder with --out"
        )

    def keep(path: Path) -> CheckpointInfo:
        info = read_fitting_info(path, config.model)
        check_whole(path, weights_alone=True)
        pin_weights(path, pin)
        return info

    folder, info = while_it_is_there(config, source, keep)
    told = f"{label}: {folder}, kept in {pin} until all is drawn"
    weights = Weights(label, pin, _training_of(folder, info), weights_checksum(pin), told)
    known = {"source": source, "checkpoint": str(folder), "iteration": info.iteration,
             "checksum": weights.checksum, "training": weights.training}  # fmt: skip
    replace_text(record, json.dumps(known, indent=1, ensure_ascii=False))
    return weights


def _keep(weights: Path, pin: Path, checksum: str) -> None:
    """Once all is drawn nothing is kept: more rows need the checkpoint itself, if it is there."""
    is_kept = (pin / "state.json").is_file()
    if not is_kept and weights.is_dir() and weights_checksum(weights) == checksum:
        pin_weights(weights, pin)


def _training_of(checkpoint: Path, info: CheckpointInfo) -> str:
    """Algorithm and rewards from the run's own settings, where the checkpoint still lies in it."""
    settings = checkpoint.parent.parent / "config.yaml"
    iterations = f"{info.iteration} iterations"
    try:
        config = load_config(settings)
    except ConfigError:
        # Copied out of its run, or another version's: what the checkpoint itself says must do.
        return iterations
    return f"{config.algorithm}: {' + '.join(config.trained_rewards)}, {iterations}"
