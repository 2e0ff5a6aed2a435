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


def of(name: str, by: str = "run") -> str:
    """The metric of that name in the table, one series a run or reward."""
    exported = known_name(name.replace("<name>", "any")).exported
    return f'max by ({by}) (ray_{exported}{{run=~"$run"}})'


def rate(name: str, by: str = "run") -> str:
    """How fast a counter of the table grows, per second."""
    exported = known_name(name.replace("<name>", "any")).exported
    return f'max by ({by}) (rate(ray_{exported}{{run=~"$run"}}[$window]))'


def grown(name: str, by: str = "run") -> str:
    """By how much a counter of the table grew within the window."""
    exported = known_name(name.replace("<name>", "any")).exported
    return f'max by ({by}) (increase(ray_{exported}{{run=~"$run"}}[$window]))'


def share(name: str) -> str:
    """Quantile of a histogram of the table; its first argument is filled in by format."""
    exported = known_name(name).exported
    return (
        "histogram_quantile({0}, sum by (le) "
        f'(rate(ray_{exported}_bucket{{{{run=~"$run"}}}}[$window])))'
    )


PHASES = ("generate", "learn", "sync", "evaluate", "checkpoint")

ROWS: dict[str, list[Panel]] = {
    "Run": [
        Panel("Iteration", "none", [(of("run/iteration"), "{{run}}"),
                                    (of("run/iterations"), "{{run}}, the last")]),
        Panel("Age of the last record and checkpoint", "s",
              [(f'time() - {of("run/recorded_unix_s")}', "{{run}} record"),
               (f'time() - {of("run/checkpoint_unix_s")}', "{{run}} checkpoint")]),
        Panel("Numbers that were NaN or infinite", "none",
              [(of("run/not_finite"), "{{run}}"),
               (of("groups/dropped"), "{{run}} groups dropped")]),
    ],
    "Is it learning": [
        Panel("Reward, mean of the iteration", "none",
              [(of("reward/<name>/mean", "run, reward"), "{{run}} {{reward}}")]),
        Panel("Reward on held-out prompts", "none",
              [(of("heldout/<name>", "run, reward"), "{{run}} {{reward}}")]),
        Panel("Spread inside a group", "none",
              [(of("reward/<name>/spread", "run, reward"), "{{run}} {{reward}}")]),
        Panel("Advantages: size, part clamped", "none",
              [(of("advantage/abs_mean"), "{{run}} size"),
               (of("advantage/clamped_share"), "{{run}} clamped")]),
        Panel("Groups whose scores do not differ", "percentunit",
              [(of("reward/<name>/constant_share", "run, reward"), "{{run}} {{reward}}")]),
        Panel("Gradient norm", "none", [(of("policy/grad_norm"), "{{run}}")]),
    ],
    "Is it healthy": [
        Panel("|Δlog p|: before the first update, largest, clip", "none",
              [(of("policy/first_max_abs_log_ratio"), "{{run}} first"),
               (of("policy/max_abs_log_ratio"), "{{run}} largest"),
               (of("run/clip"), "{{run}} clip")]),
        Panel("Ratio, mean", "none", [(of("policy/ratio_mean"), "{{run}}")]),
        Panel("Ratios clipped", "percentunit",
              [(of("policy/clip_fraction_low"), "{{run}} low"),
               (of("policy/clip_fraction_high"), "{{run}} high")]),
    ],
    "Speed": [
        Panel("Seconds of an iteration, by phase", "s",
              [(of(f"time/{phase}_s"), f"{{{{run}}}} {phase}") for phase in PHASES]),
        Panel("Evaluations a second, while it generates", "none",
              [(of("rollout/evaluations_per_s"), "{{run}}")]),
        Panel("Evaluations a second, all in all", "none",
              [(rate("rollout/evaluations"), "{{run}}")]),
        Panel("FLOP utilisation of a rollout worker", "percentunit",
              [(f'{of("rollout/tflop_per_s")} / $peak_tflops', "{{run}}")]),
        Panel("Part of the time that a role is idle", "percentunit",
              [(of(f"idle/{role}"), f"{{{{run}}}} {role}")
               for role in ("rollout", "learner", "rewards")]),
        Panel("Seconds of one prompt: median and slowest tenth", "s",
              [(share("rollout/prompt_s").format(0.5), "median"),
               (share("rollout/prompt_s").format(0.9), "slowest tenth from")]),
    ],
    "Rewards": [
        Panel("Scoring one request", "s",
              [(of("reward/<name>/latency_s", "run, reward"), "{{run}} {{reward}}")]),
        Panel("Batch fill", "percentunit",
              [(of("reward/<name>/batch_fill", "run, reward"), "{{run}} {{reward}}")]),
        Panel("Failed tries in the window", "none",
              [(grown("reward/<name>/failures", "run, reward"), "{{run}} {{reward}}")]),
        Panel("Requests at the replicas", "none",
              [("sum by (deployment) (ray_serve_replica_processing_queries)", "{{deployment}}")]),
        Panel("Replicas that are healthy", "none",
              [("sum by (deployment) (ray_serve_deployment_replica_healthy)", "{{deployment}}")]),
    ],
    "Workers and weights": [
        Panel("Rollout workers ready", "none", [(of("rollout/workers"), "{{run}}")]),
        Panel("Lost, repeated, rebuilt in the window", "none",
              [(grown("rollout/replaced"), "{{run}} workers lost"),
               (grown("rollout/repeated"), "{{run}} prompts repeated"),
               (grown("learner/rebuilds"), "{{run}} learner rebuilt")]),
        Panel("Prompts left in the phase", "none", [(of("rollout/prompts_left"), "{{run}}")]),
        Panel("Staleness of the oldest group, versions", "none",
              [(of("rollout/staleness"), "{{run}}")]),
        Panel("Weight sync", "s", [(of("time/sync_s"), "{{run}}")]),
        Panel("Weights that one receiver gets", "bytes", [(of("sync/bytes"), "{{run}}")]),
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
            x = number * WIDTH % 24
            panels.append(_panel(panel, {"x": x, "y": y, "w": WIDTH, "h": HEIGHT}))
            if x + WIDTH == 24 or number == len(row) - 1:
                y += HEIGHT
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
            {
                "refId": chr(ord("A") + n),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for n, (query, legend) in enumerate(panel.queries)
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
