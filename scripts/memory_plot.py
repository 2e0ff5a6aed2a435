"""What the processes of a run held of their card, from samples (``watching/``): a table, a plot."""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import measuring

CONTEXTS = "contexts and others"
"""What no role's allocator knows of: contexts, libraries' own memory."""
LATE_S = 2.0
"""A process that was not sampled for so long still holds what it had."""


class Sample(NamedTuple):
    """Of a process; GiB, below 0 where it is not known."""

    second: float
    role: str
    reserved: float
    allocated: float
    card_free: float
    by_nvml: float


def keep(
    folder: Path, target: Path, plan: Mapping[str, Any], limit_gib: float | None
) -> dict[str, Any]:
    """Write ``target`` with ``.csv`` and ``.svg``; returns peaks in GiB.

    Args:
        folder: of samples.
        plan: as JSON.
        limit_gib: of the card for all processes, where they were limited.
    """
    samples = read_samples(folder)
    with target.with_suffix(".csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(Sample._fields)
        writer.writerows([f if isinstance(f, str) else round(f, 3) for f in one] for one in samples)
    layers = layers_of(samples, limit_gib)
    ticks, on_card = layers.pop("seconds"), any(sample.card_free >= 0 for sample in samples)
    whole = [sum(column) for column in zip(*layers.values(), strict=True)]
    lines = {"plan": plan["fullest_card_gib"]} if on_card else {}
    lines |= {} if limit_gib is None else {"limit": limit_gib}
    allocated: dict[str, float] = {}
    for sample in samples:
        if sample.card_free >= 0 or not on_card:
            allocated[sample.role] = max(allocated.get(sample.role, 0.0), sample.allocated)
    if ticks:
        draw(ticks, layers, lines, target.with_suffix(".svg"))
    return {
        "lines_gib": lines, "peak_of_all_gib": round(max(whole, default=0.0), 2),
        "peak_reserved_gib": {role: round(max(gib), 2) for role, gib in layers.items()},
        "peak_allocated_gib": {role: round(gib, 2) for role, gib in allocated.items()},
        "planned_gib": {r: round(sum(gib.values()), 2) for r, gib in plan["memory_gib"].items()},
    }  # fmt: skip


def read_samples(folder: Path) -> list[Sample]:
    """Of all processes, seconds from the first one; processes of one role are numbered."""
    rows, pids = [], defaultdict[str, dict[str, None]](dict)
    for file in sorted(folder.glob("*.csv"), key=lambda path: path.stat().st_mtime_ns):
        for tick, role, *held in csv.reader(file.open()):
            if len(held) == 4:  # else it was cut off
                gib = [int(h) / measuring.GIB if int(h) >= 0 else -1.0 for h in held]
                rows.append((float(tick), role, file.stem, gib))
                pids[role][file.stem] = None
    first = min((row[0] for row in rows), default=0.0)

    def name(role: str, pid: str) -> str:
        return f"{role} {[*pids[role]].index(pid)}" if len(pids[role]) > 1 else role

    return sorted(Sample(t - first, name(role, pid), *gib) for t, role, pid, gib in rows)


def layers_of(samples: Sequence[Sample], limit_gib: float | None) -> dict[str, list[float]]:
    """By role the GiB reserved at every tick (``seconds``), then what the card holds beyond it: as
    NVML has it, or what is missing of the limit, if either is known.

    Where a card is used, of processes on it alone; else their host memory.
    """
    on_card = any(sample.card_free >= 0 for sample in samples)
    by_tick: dict[float, dict[str, Sample]] = defaultdict(dict)
    for sample in samples:
        if sample.card_free >= 0 or not on_card:
            by_tick[sample.second][sample.role] = sample
    ticks = sorted(by_tick)
    roles = sorted({role for found in by_tick.values() for role in found})
    layers: dict[str, list[float]] = {"seconds": ticks} | {role: [] for role in roles}
    rest, last = [], dict[str, Sample]()
    for tick in ticks:
        last = {r: s for r, s in last.items() if tick - s.second <= LATE_S} | by_tick[tick]
        for role in roles:
            layers[role].append(last[role].reserved if role in last else 0.0)
        known = sum(sample.reserved for sample in last.values())
        if on_card and all(sample.by_nvml >= 0 for sample in last.values()):
            rest.append(max(0.0, sum(sample.by_nvml for sample in last.values()) - known))
        elif on_card and limit_gib is not None:
            free = min(sample.card_free for sample in by_tick[tick].values())
            rest.append(max(0.0, limit_gib - free - known))
    return layers | ({CONTEXTS: rest} if len(rest) == len(ticks) > 0 else {})


def draw(
    ticks: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    lines: Mapping[str, float],
    file: Path,
) -> None:
    """Stacked areas over the seconds, and horizontal lines by their names, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4))
    labels = [f"{role} {max(gib):.1f}" for role, gib in layers.items()]
    axis.stackplot(ticks, *layers.values(), labels=labels)
    for name, value in lines.items():
        axis.axhline(value, color="#333", linestyle="--", linewidth=1)
        axis.annotate(f" {name} {value:.1f}", (1, value), xycoords=axis.get_yaxis_transform())
    axis.set(xlabel="seconds", ylabel="GiB reserved, and the peak of each role")
    axis.legend(reverse=True, loc="lower left", bbox_to_anchor=(1, 0), frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, bbox_inches="tight")
