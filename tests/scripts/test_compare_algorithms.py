"""What a run is worth at a budget."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("compare_algorithms")


def run(script: ModuleType, measured: list[tuple[float, float]], base: float = -9.0) -> Any:
    """A run measured at (seconds, reward): ten evaluations and an iteration a second."""
    points = [script.Point(0, 0, 0.0, {"oracle": base})]
    points += [script.Point(round(s), round(10 * s), s, {"oracle": r}) for s, r in measured]
    return script.Result(script.Job("row", 0, 1e-4, 1, 1, 1.0, 1), points, None)


def test_value_is_the_mean_of_the_line_over_the_last_third(script: ModuleType) -> None:
    result = run(script, [(10, 0.4), (20, 0.8), (40, 0.6)])
    # From 20 s to 30 s, where the line is at 0.7.
    point = script.at_budget(result, "train_s", 30)
    assert point.rewards["oracle"] == pytest.approx(0.75)
    assert (point.iteration, point.evaluations, point.train_s) == (30, 300, 30)
    # From 16 s (0.64) over 20 s (0.8) to 24 s (0.76).
    point = script.at_budget(result, "iteration", 24)
    assert point.rewards["oracle"] == pytest.approx((0.72 * 4 + 0.78 * 4) / 8)


def test_how_often_a_row_is_measured_does_not_decide_where_it_is_read(script: ModuleType) -> None:
    often, rarely = (
        run(script, [(float(s), s / 100) for s in range(every, 121, every)]) for every in (5, 60)
    )
    values = [script.at_budget(r, "evaluations", 1000).rewards["oracle"] for r in (often, rarely)]
    assert values == pytest.approx([5 / 6, 5 / 6])


def test_the_untrained_model_is_no_measurement_of_a_row(script: ModuleType) -> None:
    measured = [(10.0, 0.4), (30.0, 0.8)]
    for base in (0.0, 1.0):
        point = script.at_budget(run(script, measured, base), "train_s", 15)
        assert point.rewards["oracle"] == pytest.approx(0.45)


def test_what_is_published_names_no_folder_and_is_read_again(script: ModuleType) -> None:
    result = run(script, [(10, 0.4), (20, 0.8)])
    [found] = script.as_json([result])
    assert not {"config", "keep", "until_s"} & found["job"].keys()
    again = script.TypeAdapter(script.Result).validate_python(found)
    assert again.points == result.points


@pytest.mark.parametrize("limit", [12, 31])
def test_a_budget_outside_the_measurements_is_refused(script: ModuleType, limit: float) -> None:
    result = run(script, [(10, 0.4), (30, 0.8)])
    with pytest.raises(ValueError, match=f"row, seed 0: train_s {limit} needs measurements"):
        script.at_budget(result, "train_s", limit)


def test_a_table_that_cannot_be_read_costs_no_other(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The first iteration compiles: at two thirds of its seconds a run was not yet measured.
    points = [script.Point(0, 0, 0.0, {"oracle": 0.2})]
    points += [script.Point(i, 10 * i, 50.0 + i, {"oracle": 0.1 * i}) for i in range(1, 7)]
    result = script.Result(script.Job("E-GRPO", 0, 1e-4, 6, 60, 1e4, 1), points, None)
    runs, tables = tmp_path / "runs.json", tmp_path / "tables.md"
    runs.write_text(json.dumps({"runs": script.as_json([result])}))
    arguments = ["--rows", "E-GRPO", "--runs", str(runs), "--iterations", "6"]
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--markdown", str(tables)])
    assert script.main() == 0
    text = tables.read_text()
    assert "At equal iterations (6)" in text
    assert "wall time" not in text
    # The mean from iteration 4 to 6; of one seed there is no spread.
    assert "| E-GRPO | 0.0001 | 6 | 60 | 56 | 0.500 |" in text
    assert "no table: E-GRPO, seed 0: train_s 56 needs measurements" in capsys.readouterr().err


@pytest.mark.parametrize("tuned", [False, True])
def test_a_row_with_a_rate_of_its_own_says_so_and_is_not_tuned(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: bool
) -> None:
    asked: list[Any] = []

    def done(jobs: Any, *_: Any) -> list[Any]:
        asked.extend(jobs)
        return [
            script.Result(job, run(script, [(10, 0.4)]).points, None, done=False) for job in jobs
        ]

    monkeypatch.setattr(script, "run_all", done)
    rows, rates = tmp_path / "rows.yaml", tmp_path / "rates.json"
    own = {"algorithm": "g2rpo", "learner.learning_rate": 3e-4}
    rows.write_text(json.dumps({"quickstart": {"own": own, "other": {"algorithm": "g2rpo"}}}))
    monkeypatch.setattr(script, "ROWS", rows)
    rates.write_text(json.dumps({"other": 2e-4}))
    tuning = ["--learning-rates", "1e-4", "2e-4", "--tuning", str(rates)] if tuned else []
    monkeypatch.setattr(sys, "argv", ["compare", *tuning])
    assert script.main() == 3
    found = {job.row: job.learning_rate for job in asked}
    assert found == {"own": 3e-4, "other": 2e-4 if tuned else 1e-4}
    assert not [key for job in asked for key in job.overrides if "learning_rate" in key]
