"""The Grafana dashboard of a run: writes cluster/monitoring/dashboard.json.

    python -m g2rpo_ray.tracking.dashboard cluster/monitoring/dashboard.json

The panels are listed here because a list can be read and reviewed; Grafana's JSON cannot. A test
keeps the file in step with it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from g2rpo_ray.tracking.names import known_name

WIDTH, HEIGHT = 8, 7
"""Of a panel, in Grafana's grid of 24 columns."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    unit: str
    """Grafana's name of a unit; ``none`` for plain numbers."""
    queries: Sequence[tuple[str, str]]
    """(PromQL, legend)."""
    needs: str = ""
    """What a run must have for the panel to show anything; none means every run."""


def query(name: str, of: str = "{}", by: str = "run") -> str:
    """The metric of that name in the table, one series a run or reward.

    Args:
        of: what to take of it, ``RATE`` or ``GROWN``; as it is where nothing is said.
    """
    exported = known_name(name.replace("<name>", "any")).exported
    return f"max by ({by}) ({of.format(SERIES.format(exported))})"


def by_run(name: str, legend: str = "{{run}}", of: str = "{}") -> tuple[str, str]:
    """A query and its legend."""
    return query(name, of), legend


def by_reward(name: str, of: str = "{}") -> tuple[str, str]:
    """A query and its legend, one series a run and reward."""
    return query(name, of, "run, reward"), "{{run}} {{reward}}"


def quantile(part: float, name: str, legend: str) -> tuple[str, str]:
    """Of a histogram of the table, with its legend."""
    rate = RATE.format(SERIES.format(f"{known_name(name).exported}_bucket"))
    return f"histogram_quantile({part}, sum by (le) ({rate}))", legend


SERIES = 'ray_{}{{run=~"$run"}}'
RATE = "rate({}[$window])"
"""How fast a counter grows, per second."""
GROWN = "increase({}[$window])"
"""By how much a counter grew within the window."""
PHASES = ("generate", "learn", "sync", "evaluate", "checkpoint")

ROWS: dict[str, list[Panel]] = {
    "Run": [
        Panel("Iteration", "none",
              [by_run("run/iteration"), by_run("run/iterations", "{{run}}, the last")]),
        Panel("Age of the last record and checkpoint", "s",
              [(f'time() - {query("run/recorded_unix_s")}', "{{run}} record"),
               (f'time() - {query("run/checkpoint_unix_s")}', "{{run}} checkpoint")]),
        Panel("Numbers that were NaN or infinite", "none",
              [by_run("run/not_finite"), by_run("groups/dropped", "{{run}} groups dropped")]),
    ],
    "Is it learning": [
        Panel("Reward, mean of the iteration", "none", [by_reward("reward/<name>/mean")]),
        Panel("Reward on held-out prompts", "none", [by_reward("heldout/<name>")]),
        Panel("Spread inside a group", "none", [by_reward("reward/<name>/spread")]),
        Panel("Advantages: size, part clamped", "none",
              [by_run("advantage/abs_mean", "{{run}} size"),
               by_run("advantage/clamped_share", "{{run}} clamped")]),
        Panel("Groups whose scores do not differ", "percentunit",
              [by_reward("reward/<name>/constant_share")]),
        Panel("Gradient norm", "none", [by_run("policy/grad_norm")]),
    ],
    "Is it healthy": [
        Panel("|Δlog p|: before the first update, largest, clip", "none",
              [by_run("policy/first_max_abs_log_ratio", "{{run}} first"),
               by_run("policy/max_abs_log_ratio", "{{run}} largest"),
               by_run("run/clip", "{{run}} clip")]),
        Panel("Ratio, mean", "none", [by_run("policy/ratio_mean")]),
        Panel("Ratios clipped", "percentunit",
              [by_run("policy/clip_fraction_low", "{{run}} low"),
               by_run("policy/clip_fraction_high", "{{run}} high")]),
    ],
    "Speed": [
        Panel("Seconds of an iteration, by phase", "s",
              [by_run(f"time/{phase}_s", f"{{{{run}}}} {phase}") for phase in PHASES]),
        Panel("Evaluations a second, while it generates", "none",
              [by_run("rollout/evaluations_per_s")]),
        Panel("Evaluations a second, all in all", "none", [by_run("rollout/evaluations", of=RATE)]),
        Panel("FLOP utilisation of a rollout worker", "percentunit",
              [(f'{query("rollout/tflop_per_s")} / $peak_tflops', "{{run}}")]),
        Panel("Part of the time that a role is idle", "percentunit",
              [by_run(f"idle/{role}", f"{{{{run}}}} {role}")
               for role in ("rollout", "learner", "rewards")]),
        Panel("Seconds of one prompt: median and slowest tenth", "s",
              [quantile(0.5, "rollout/prompt_s", "median"),
               quantile(0.9, "rollout/prompt_s", "slowest tenth from")]),
    ],
    "Rewards": [
        Panel("Scoring one request", "s", [by_reward("reward/<name>/latency_s")]),
        Panel("Batch fill", "percentunit", [by_reward("reward/<name>/batch_fill")]),
        Panel("Failed tries in the window", "none", [by_reward("reward/<name>/failures", GROWN)]),
        Panel("Requests at the replicas", "none",
              [("sum by (deployment) (ray_serve_replica_processing_queries)", "{{deployment}}")]),
        Panel("Replicas that are healthy", "none",
              [("sum by (deployment) (ray_serve_deployment_replica_healthy)", "{{deployment}}")]),
    ],
    "Workers and weights": [
        Panel("Rollout workers ready", "none", [by_run("rollout/workers")]),
        Panel("Lost, repeated, rebuilt in the window", "none",
              [by_run("rollout/replaced", "{{run}} workers lost", GROWN),
               by_run("rollout/repeated", "{{run}} prompts repeated", GROWN),
               by_run("learner/rebuilds", "{{run}} learner rebuilt", GROWN)]),
        Panel("Prompts left in the phase", "none", [by_run("rollout/prompts_left")]),
        Panel("Staleness of the oldest group, versions", "none", [by_run("rollout/staleness")]),
        Panel("Weight sync", "s", [by_run("time/sync_s")]),
        Panel("Weights that one receiver gets", "bytes", [by_run("sync/bytes")]),
    ],
    "Nodes": [
        Panel("GPU utilisation", "percent",
              [("avg by (instance) (ray_node_gpus_utilization)", "{{instance}}")], needs="a GPU"),
        Panel("GPU memory used", "decmbytes",
              [("sum by (instance) (ray_node_gram_used)", "{{instance}}")], needs="a GPU"),
        Panel("CPU utilisation", "percent",
              [("avg by (instance) (ray_node_cpu_utilization)", "{{instance}}")]),
        Panel("Memory used", "bytes", [("sum by (instance) (ray_node_mem_used)", "{{instance}}")]),
        Panel("Object store", "bytes",
              [("sum by (Location) (ray_object_store_memory)", "{{Location}}")]),
        Panel("Disk free", "bytes", [("min by (instance) (ray_node_disk_free)", "{{instance}}")]),
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place})
        y += 1
        for number, panel in enumerate(row):
            line, column = divmod(number, 24 // WIDTH)
            place = {"x": column * WIDTH, "y": y + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, place))
        y = place["y"] + HEIGHT
    for number, entry in enumerate(panels, start=1):
        entry["id"] = number
    return {
        "title": "g2rpo runs",
        "uid": "g2rpo-runs",
        "tags": ["g2rpo", "ray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": f"Empty without {panel.needs}." if panel.needs else "",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": letter, "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for letter, (expression, legend) in zip(ascii_uppercase, panel.queries, strict=False)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": SOURCE,
            "query": "label_values(ray_g2rpo_run_iteration, run)",
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
        },
        {
            "name": "window",
            "type": "custom",
            "label": "Window of rates",
            "query": "5m,15m,1h,6h",
            "current": {"text": "15m", "value": "15m"},
        },
        {
            "name": "peak_tflops",
            "type": "textbox",
            "label": "Peak of a GPU, TFLOP/s",
            "query": "795",
            "current": {"text": "795", "value": "795"},
        },
    ]


def main(path: Path) -> None:
    """Write the dashboard."""
    path.write_text(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
