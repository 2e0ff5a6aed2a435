"""The names of the numbers that a run records, from the one table: ``metrics.md`` beside this."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from g2rpo_ray.common.errors import InputError


class TrackingError(InputError):
    """A record of the run cannot be kept; the message says where, what, and what is allowed."""


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    pattern: str
    """The name, such as ``reward/<name>/mean``."""
    unit: str
    """Unit of the number; ``1`` for a plain ratio or score."""
    kind: str
    """What Ray's metrics endpoint makes of it: the last number (``gauge``), the sum over all
    iterations (``counter``), or the distribution of many (``histogram``)."""
    meaning: str
    """What the number says."""
    reward: str | None = None
    """The reward that stands for ``<name>``; none where the row has no such part."""

    @property
    def exported(self) -> str:
        """Name for systems that allow neither dots nor slashes: ``g2rpo_reward_mean``.

        A counter ends in ``_total``. Ray puts ``ray_`` before all of them.
        """
        name = "g2rpo_" + self.pattern.replace("/<name>", "").replace("/", "_")
        return f"{name}_total" if self.kind == "counter" else name


@cache
def known_name(name: str) -> Metric:
    """Find the row of a metric's name, with the reward that the name is of.

    Raises:
        TrackingError: the table has no such row.
    """
    for pattern, metric in METRICS.items():
        expression = re.escape(pattern).replace("<name>", "([a-z][a-z0-9_]*)")
        if match := re.fullmatch(expression, name):
            return replace(metric, reward=match[1] if match.groups() else None)
    topic = name.partition("/")[0]
    allowed = [pattern for pattern in METRICS if pattern.partition("/")[0] == topic]
    raise TrackingError(
        f"metric {name!r} is not in g2rpo_ray/tracking/metrics.md; "
        f"allowed: {', '.join(allowed or METRICS)}"
    )


def _rows() -> Iterator[Metric]:
    table = (files("g2rpo_ray.tracking") / "metrics.md").read_text(encoding="utf-8")
    # A bar, as in |Δlog p|, would end the cell, so it is written with a backslash.
    for cells in re.findall(r"^\| `(\S+)` \| (\S+) \| (\w+) \| (.+) \|$", table, re.MULTILINE):
        yield Metric(*(cell.replace("\\|", "|") for cell in cells))


METRICS = {metric.pattern: metric for metric in _rows()}
"""Every row by its name; those under "On Ray's endpoint only" are part of no record."""
