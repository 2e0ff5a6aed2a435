"""Ray's metrics endpoint, which Prometheus scrapes."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from g2rpo_ray.tracking.names import Metric, known_name
from g2rpo_ray.tracking.sinks import Sink

SECONDS = [1.0, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600]
"""Upper bounds of a histogram's buckets."""


class RayEndpoint(Sink):
    """Every number as ``ray_g2rpo_...``; the label ``run`` tells runs on one cluster apart. Silent
    without Ray."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._metrics: dict[str, Any] = {}
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._iteration = 0

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self.live(values)
        # An evaluation beside the training is recorded later than iterations after its own.
        self._iteration = max(self._iteration, iteration)
        self.live(
            {
                "run/iteration": self._iteration,
                "run/recorded_unix_s": time.time(),
                "run/not_finite": sum(not math.isfinite(value) for value in values.values()),
            }
        )

    def live(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            # Ray exports neither NaN nor infinity; run/not_finite says that there was one.
            if math.isfinite(value):
                self._set(name, float(value))

    def observe(self, name: str, values: Sequence[float]) -> None:
        from ray.util.metrics import Histogram

        for value in values:
            histogram = self._metric(name, Histogram, boundaries=SECONDS)
            if histogram is not None:
                histogram.observe(float(value), tags=self._tags(name))

    def _set(self, name: str, value: float) -> None:
        from ray.util.metrics import Gauge

        if known_name(name).kind == "counter":
            # Not Ray's Counter: it cannot be 0, and where nothing was, no alert sees a rise.
            self._totals[name] += value
            value = self._totals[name]
        gauge = self._metric(name, Gauge)
        if gauge is not None:
            gauge.set(value, tags=self._tags(name))

    def _metric(self, name: str, kind: type, **options: Any) -> Any:
        """Ray's metric of that name, made at first use; none while Ray is not initialised."""
        import ray

        if not ray.is_initialized():
            return None
        known = known_name(name)
        if known.exported not in self._metrics:
            self._metrics[known.exported] = kind(
                known.exported,
                description=_description(known),
                tag_keys=("run", "reward") if known.reward else ("run",),
                **options,
            )
        return self._metrics[known.exported]

    def _tags(self, name: str) -> dict[str, str]:
        reward = known_name(name).reward
        return {"run": self._run} | ({"reward": reward} if reward else {})


def _description(metric: Metric) -> str:
    # Ray refuses any other character than ASCII.
    text = f"{metric.meaning} Unit: {metric.unit}.".replace("Δ", "change of ").replace("±", "+-")
    return text.encode("ascii", "replace").decode()
