"""Where metrics go: JSON lines, TensorBoard, Weights & Biases; Ray's own are in ``endpoint``."""

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from g2rpo_ray.common.files import replace_text, writing
from g2rpo_ray.common.secrets import publishable
from g2rpo_ray.tracking.names import TrackingError


class Sink:
    """One place that metrics go to. Pictures are ignored where a sink has no room for them."""

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of one iteration; the names are known to be in the table."""
        raise NotImplementedError

    def pictures(self, iteration: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Keep uint8 ``[height, width, 3]`` pictures by caption."""

    def live(self, values: Mapping[str, float]) -> None:
        """Show numbers of now that are no part of any record."""

    def observe(self, name: str, values: Sequence[float]) -> None:
        """Add to the distribution of a histogram."""

    def close(self) -> None:
        """Write what is still held back."""


class JsonLines(Sink):
    """``metrics.jsonl``: one line per record, in the file as soon as it is made."""

    def __init__(self, path: Path, resume_iteration: int | None) -> None:
        if resume_iteration is not None:
            # The resumed run makes the others again. A crash here leaves the old file or the new.
            kept = [one for one in read_lines(path) if one["iteration"] < resume_iteration]
            replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        elif path.exists() and path.stat().st_size:
            raise TrackingError(
                f"{path} already holds the metrics of a run; resume that run or choose another "
                "run_dir (appending would count its iterations twice)"
            )
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        kind = "evaluation" if any(name.startswith("heldout/") for name in values) else "train"
        line = {"iteration": iteration, "kind": kind}
        line |= {name: _json_number(value) for name, value in values.items()}
        with writing(self._path, TrackingError):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        # What could not be written was told; closing tries again, and would hide it.
        with suppress(OSError):
            self._file.close()


class TensorBoard(Sink):
    """Event files; on resume TensorBoard hides what earlier files hold from there on."""

    def __init__(self, folder: Path, resume_iteration: int | None) -> None:
        # Imported here: it costs a second, and only runs that ask for it should pay.
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder, TrackingError):
            self._writer = SummaryWriter(str(folder), purge_step=resume_iteration)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, iteration)
            self._writer.flush()

    def pictures(self, iteration: int, pictures: Mapping[str, np.ndarray]) -> None:
        with writing(self._folder):
            for caption, picture in pictures.items():
                self._writer.add_image(f"pictures/{caption}", picture, iteration, dataformats="HWC")
            self._writer.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._writer.close()


class WeightsAndBiases(Sink):
    """A W&B run that a resumed run continues.

    W&B ignores steps below the last one it has, so iterations that are done again after a resume
    are not counted twice there either.
    """

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise TrackingError(
                f"tracking.wandb_project is {project!r} but the package wandb cannot be imported "
                f"({error}); install g2rpo-ray[wandb] or set tracking.wandb_project=null"
            ) from error
        identity = run_dir / "wandb_run_id"
        if not identity.exists():
            replace_text(identity, uuid.uuid4().hex[:12])
        self._wandb, self._step = wandb, 0
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=identity.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(run_dir),
            config=publishable(config),
        )
        # An evaluation beside the training ends when later iterations are there already.
        for name in ("heldout/*", "pictures"):
            self._run.define_metric(name, step_metric="evaluation/iteration")

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        evaluated = any(name.startswith("heldout/") for name in values)
        own_step = {"evaluation/iteration": iteration} if evaluated else {}
        self._log({**values, **own_step}, iteration)

    def pictures(self, iteration: int, pictures: Mapping[str, np.ndarray]) -> None:
        images = [self._wandb.Image(picture, caption=text) for text, picture in pictures.items()]
        self._log({"pictures": images, "evaluation/iteration": iteration}, iteration)

    def _log(self, values: dict[str, Any], iteration: int) -> None:
        self._step = max(self._step, iteration)
        self._run.log(values, step=self._step)

    def close(self) -> None:
        self._run.finish()


def read_lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Every record of a ``metrics.jsonl``, or those of a kind; none while there is no such file.

    A last line that a crash cut short is left out. In memory is what is asked for: a long run looks
    for its evaluations again and again.

    Raises:
        TrackingError: a line before the last is not a record.
    """
    records: list[dict[str, Any]] = []
    broken: TrackingError | None = None
    if not path.exists():
        return records
    if path.is_dir():
        raise TrackingError(f"{path} is a folder; a run's metrics are lines of a file of this name")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if broken is not None:
                raise broken
            try:
                record = _parse_record(line)
            except ValueError as error:
                broken = TrackingError(
                    f"{path}, line {number}: not a metrics record: {error}; remove that line: the "
                    "run then lacks its numbers, and nothing else"
                )
                broken.__cause__ = error
                continue
            if kind in (None, record["kind"]):
                records.append(record)
    return records


def _parse_record(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    if not (isinstance(record, dict) and isinstance(record.get("iteration"), int)):
        raise ValueError("expected an object with an integer 'iteration'")
    if record.get("kind") not in ("train", "evaluation"):
        raise ValueError(f"'kind' is {record.get('kind')!r}; allowed: 'train', 'evaluation'")
    for name, value in record.items():
        if name.startswith("heldout/") and not isinstance(value, int | float | None):
            raise ValueError(f"{name!r} is {value!r:.60}; expected a number, or null")
    return record


def _json_number(value: float) -> float | None:
    """JSON has no NaN and no infinity: null says that there is no number, 0 would be a lie."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
