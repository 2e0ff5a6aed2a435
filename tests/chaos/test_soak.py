"""Short soaks: a run that is disturbed ends with the weights of one that is not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_train import check_whole

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800.0
"""Four minutes on two free cores."""


def soak(folder: Path, *options: str) -> dict[str, Any]:
    """What ``scripts/soak.py`` reports; it must have found the run good."""
    report = folder / "soak.json"
    process = subprocess.Popen(
        [sys.executable, "scripts/soak.py", "--json", str(report),
         "--folder", str(folder / "runs"), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    finally:
        # Not SIGKILL: it ends the cluster and the driver that it has started.
        process.terminate()
        process.wait(120)
    assert process.returncode == 0, printed
    return json.loads(report.read_text())


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 90)
@pytest.mark.parametrize(
    ("options", "faults", "last"),
    [
        # The second raylet, then the driver; SIGTERM has tests/integration/test_signals.py.
        (["--faults", "1", "--seed", "9", "--end", "SIGKILL"], ["raylet_kill"], ("sigkill", -9)),
        pytest.param(
            ["--faults", "2"],
            ["driver_kill", "raylet_kill"],
            ("sigterm", 85),
            marks=pytest.mark.long,
        ),
    ],
    ids=["killed", "stopped"],
)
def test_a_run_that_is_disturbed_ends_with_the_weights_of_one_that_is_not(
    tmp_path: Path, options: list[str], faults: list[str], last: tuple[str, int]
) -> None:
    # The faults that no smaller test has; those of single roles are in tests/rollout/test_pool.py,
    # tests/learner/test_rebuild.py and tests/rewards/test_elasticity.py.
    result = soak(tmp_path, *options)
    assert result["faults_by_kind"] == dict.fromkeys(faults, 1)
    assert result["driver_deaths"] == 0, result["driver_deaths_after"]
    assert result["checksum_equal"]
    assert (result["groups_lost"], result["groups_doubled"]) == (0, 0)
    assert result["evaluations_equal"], "a network evaluation was counted twice, or not at all"
    assert result[last[0]]["exit_code"] == last[1]
    assert not any(result["leaks"].values()), result["leaks"]
    check_whole(tmp_path / "runs" / "quiet", result["iterations"])


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 90)
def test_a_week_of_sixty_iterations(tmp_path: Path) -> None:
    """Under a judge of all moods, with workers that come and go, and one step off likewise."""
    result = soak(tmp_path, "--week", "60", "--limit-s", "300")
    assert result["checksum_equal"]
    assert result["evaluations_equal"]
    runs = result["runs"]
    assert set(runs) == {"quiet", "disturbed", "one_step_off"}
    for name, run in runs.items():
        assert run["whole"], name
        assert (run["iterations"], run["groups"]) == (60, 120)
        assert (run["iterations_twice_or_lost"], run["driver_deaths"]) == (0, 0), name
        assert not run["leaks"] | dict.fromkeys(run["grew"]), name
    for name in ("disturbed", "one_step_off"):
        assert set(runs[name]["moods"]) == {"slow", "limiting", "wrong", "silent", "down"}
        assert set(runs[name]["losses"]) == {"worker", "node"}
    assert runs["one_step_off"]["most_staleness"] == 1
