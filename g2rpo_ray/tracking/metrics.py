"""MetricsLog: every number of a run, by a name from the one table, to every sink."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from g2rpo_ray.config.operation import TrackingSection
from g2rpo_ray.tracking.endpoint import RayEndpoint
from g2rpo_ray.tracking.names import TrackingError, known_name
from g2rpo_ray.tracking.sinks import JsonLines, Sink, TensorBoard, WeightsAndBiases, read_lines


class MetricsLog:
    """Context manager that writes the metrics of a run.

    Args:
        run_dir: folder of the run; made if it is missing.
        tracking: which sinks to use besides ``metrics.jsonl`` and Ray's endpoint.
        config: the resolved configuration, shown by Weights & Biases.
        resume_iteration: first iteration that will be recorded by a resumed run; records of an
            earlier life from there on are dropped. None for a new run.

    Raises (on entry, before anything is trained):
        TrackingError: the folder already holds a run, or wandb is asked for and not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        tracking: TrackingSection,
        config: Mapping[str, Any],
        resume_iteration: int | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._tracking = tracking
        self._config = config
        self._resume_iteration = resume_iteration
        self._sinks: list[Sink] = []
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            for sink in self._open():
                opened.callback(sink.close)
                self._sinks.append(sink)
            self._closing = opened.pop_all()
        return self

    def _open(self) -> Iterator[Sink]:
        # The one that can refuse for want of a package comes first: it leaves no trace.
        if self._tracking.wandb_project is not None:
            yield WeightsAndBiases(self._run_dir, self._tracking.wandb_project, self._config)
        yield JsonLines(self._run_dir / "metrics.jsonl", self._resume_iteration)
        if self._tracking.tensorboard:
            yield TensorBoard(self._run_dir / "tensorboard", self._resume_iteration)
        yield RayEndpoint(self._run_dir.name)

    def __exit__(self, *_: object) -> None:
        self._sinks.clear()
        self._closing.close()

    def record(self, iteration: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one iteration, or of the evaluation after it (``heldout/...``).

        Args:
            iteration: counted from 1; 0 is the evaluation before training.
            values: by names of the table, in the table's units. NaN and infinity are kept as
                "no number", never as 0.

        Raises:
            TrackingError: a name is not in the table; nothing of the record is written then.
        """
        for name in values:
            known_name(name)
        for sink in self._sinks:
            sink.scalars(iteration, values)

    def live(self, values: Mapping[str, float]) -> None:
        """Show numbers of now (no part of any record) where a sink can: Ray's endpoint."""
        for sink in self._sinks:
            sink.live(values)

    def observe(self, name: str, values: Sequence[float]) -> None:
        """Add to the distribution of a histogram."""
        for sink in self._sinks:
            sink.observe(name, values)

    def pictures(self, iteration: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Show pictures, uint8 ``[height, width, 3]`` by caption, where a sink can: TensorBoard and
        Weights & Biases."""
        for caption, picture in pictures.items():
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
                raise TrackingError(
                    f"picture {caption!r} of iteration {iteration} is {picture.dtype} "
                    f"{list(picture.shape)}; expected uint8 [height, width, 3]"
                )
        for sink in self._sinks:
            sink.pictures(iteration, pictures)


def read_metrics(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Records of a run, or those of a kind, in the order they were made; empty when there are none.

    Each has ``iteration``, ``kind`` (``train`` or ``evaluation``) and numbers by metric name;
    None stands for NaN or infinity.
    """
    return read_lines(run_dir / "metrics.jsonl", kind)
