"""What a run is worth at a budget."""

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
