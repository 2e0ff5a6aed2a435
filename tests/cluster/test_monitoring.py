"""cluster/monitoring: alerts that fire when they must, a dashboard whose every query has an answer.

Debian's Prometheus scrapes a small run of the real command line.
"""

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from g2rpo_ray.tracking.metrics import read_metrics
from g2rpo_ray.tracking.names import METRICS
from tests.cluster.prometheus import MONITORING, Prometheus, missing, prometheus
from tests.integration.command import TIMEOUT_S, Command, train, wait_until
from tests.tiny import tiny_config

needs_prometheus = pytest.mark.skipif(missing() is not None, reason=str(missing()))

CASES = Path(__file__).parent / "alerts_test.yml"
VARIABLES = {"$run": ".*", "$window": "1m", "$peak_tflops": "795"}
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def alerts() -> dict[str, str]:
    """Expression of every alert, by name."""
    tree = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    return {rule["alert"]: rule["expr"] for group in tree["groups"] for rule in group["rules"]}


def own_metrics(expression: str) -> set[str]:
    """Names of this project's metrics in a query."""
    return set(re.findall(r"ray_(g2rpo_\w+)", expression))


def filled(query: str) -> str:
    """A panel's query with its variables replaced."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    return query


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_alerts_and_panels_ask_for_metrics_that_there_are() -> None:
    exported = {metric.exported for metric in METRICS.values()}
    asked_by_panels = [target["expr"] for panel in PANELS for target in panel["targets"]]
    for expression in [*asked_by_panels, *alerts().values()]:
        asked = {name.removesuffix("_bucket") for name in own_metrics(expression)}
        assert asked <= exported, f"{asked - exported} in {expression}"


@needs_prometheus
def test_every_alert_fires_when_it_must_and_only_then() -> None:
    for command in (
        ["check", "rules", str(MONITORING / "alerts.yml")],
        ["test", "rules", str(CASES)],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def labels_of(text: str) -> dict[str, str]:
    """Those of a series or a sample that tell runs and alerts apart."""
    labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
    return {name: labels[name] for name in ("alertname", "run", "reward") if name in labels}


def must_fire(case: dict[str, Any]) -> list[dict[str, str]]:
    """Labels of every alert that a case of alerts_test.yml expects."""
    found = [
        {"alertname": test["alertname"], "run": alert["exp_labels"]["run"]}
        for test in case.get("alert_rule_test", [])
        for alert in test.get("exp_alerts", [])
    ]
    for test in case.get("promql_expr_test", []):
        # Nothing but what is listed may fire in such a test.
        assert test["expr"] == 'ALERTS{alertstate="firing"}'
        found += [labels_of(sample["labels"]) for sample in test["exp_samples"]]
    return found


@pytest.mark.parametrize("name", sorted(alerts()))
def test_every_alert_has_a_case_that_raises_it_and_one_beside_it_that_must_not(name: str) -> None:
    metrics = {f"ray_{metric}" for metric in own_metrics(alerts()[name])}
    cases = []
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        fired = [dict(labels) for labels in must_fire(case) if labels.pop("alertname") == name]
        watched = [
            labels_of(one["series"])
            for one in case["input_series"]
            if one["series"].split("{")[0] in metrics
        ]
        silent = [one for one in watched if not any(f.items() <= one.items() for f in fired)]
        if fired and silent:
            cases.append(case["name"])
    assert len(cases) == 1


@dataclass(frozen=True)
class Watched:
    """A run that Prometheus has scraped to its end."""

    run_dir: Path
    prometheus: Prometheus
    started_s: float
    session: Path
    """Ray's session folder."""

    def last(self, expression: str) -> dict[str, float]:
        """Last value of each series while the run went on, by its labels as text."""
        series = self.prometheus.query_range(expression, self.started_s, time.time(), 1.0)
        return {
            json.dumps(one["metric"], sort_keys=True): float(one["values"][-1][1]) for one in series
        }


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder: Path = tmp_path_factory.mktemp("watched")
    config = tiny_config(
        folder / "mine",
        "iterations=16",
        "rollout.workers=1",
        "learner.ranks=1",
        "checkpoint.every=4",
        "cluster.dashboard=true",
    )
    started_s = time.time()
    # Ray hands numbers on every 10 s by itself, and the run is short.
    command = train(config, RAY_metrics_report_interval_ms="1000")
    try:
        wait_until(lambda: discovery(command) != [], "Ray's list of targets")
        (targets,) = discovery(command)
        with prometheus(folder, [str(targets)]) as server:
            assert command.wait() == 0, command.text
            yield Watched(folder / "mine", server, started_s, targets.parent)
    finally:
        command.kill()


def discovery(command: Command) -> list[Path]:
    """Files that name the metrics endpoints of the command's own Ray session."""
    assert command.process.poll() is None, command.text
    pattern = f"session_*_{command.process.pid}/prom_metrics_service_discovery.json"
    return list(Path("/tmp/ray").glob(pattern))


@needs_prometheus
@pytest.mark.long
@pytest.mark.timeout(2 * TIMEOUT_S)
class TestRealRun:
    @pytest.mark.parametrize(
        "panel",
        [panel for panel in PANELS if panel["description"] != "Empty without a GPU."],
        ids=lambda panel: panel["title"],
    )
    def test_every_query_of_the_dashboard_returns_series(
        self, watched: Watched, panel: dict[str, Any]
    ) -> None:
        for target in panel["targets"]:
            assert watched.last(filled(target["expr"])), target

    @pytest.mark.parametrize("name", sorted(alerts()))
    def test_every_alert_is_evaluated_on_series_that_there_are(
        self, watched: Watched, name: str
    ) -> None:
        (rule,) = [rule for rule in watched.prometheus.rules() if rule["name"] == name]
        assert (rule["health"], rule.get("lastError", "")) == ("ok", "")
        assert rule["state"] != "firing"
        for metric in own_metrics(alerts()[name]):
            assert watched.last(f"ray_{metric}"), metric

    def test_the_numbers_are_those_of_the_run(self, watched: Watched) -> None:
        records: list[dict[str, Any]] = read_metrics(watched.run_dir)
        trained = [record for record in records if record["kind"] == "train"]
        seen = watched.last('max by (run) (ray_g2rpo_run_iteration{run="mine"})')
        # Ray hands on what changed every few seconds: the last iterations may not be seen any more.
        last_seen = int(seen['{"run": "mine"}'])
        assert last_seen >= 1
        for reward in ("clip", "hps"):
            series = watched.prometheus.query_range(
                f'ray_g2rpo_reward_mean{{run="mine", reward="{reward}"}}',
                watched.started_s, time.time(), 1.0,
            )  # fmt: skip
            scraped = {float(value) for one in series for _, value in one["values"]}
            recorded = [record[f"reward/{reward}/mean"] for record in trained]
            assert scraped
            assert all(any(math.isclose(s, r, rel_tol=1e-6) for r in recorded) for s in scraped)

    def test_the_logs_of_all_roles_say_who_wrote_them_and_on_what(self, watched: Watched) -> None:
        paths = [watched.run_dir / "log.jsonl", *watched.session.glob("logs/worker-*.err")]
        texts = [line for path in paths for line in path.read_text().splitlines()]
        lines = [json.loads(text) for text in texts if text.startswith("{")]
        by_role = {line["role"]: line for line in lines if "role" in line}
        assert by_role.keys() >= {"driver", "rollout", "learner"}
        # Two prompts an iteration: group 3 is the second one of the second iteration.
        (drawn,) = [line for line in lines if line.get("group_id") == 3]
        assert (drawn["role"], drawn["rank"], drawn["iteration"]) == ("rollout", 0, 1)
        updated = [line for line in lines if line["message"] == "updated the weights"]
        assert drawn["prompt_id"] in updated[1]["prompt_ids"]
        assert [line["iteration"] for line in updated] == list(range(16))
