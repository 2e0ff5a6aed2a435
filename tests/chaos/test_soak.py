"""A short soak: four faults and a SIGTERM, and the same weights as a run that nobody disturbed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 90)
def test_a_run_that_is_disturbed_ends_with_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    soak = subprocess.Popen(
        [sys.executable, "scripts/soak.py", "--faults", "4", "--json", str(report),
         "--folder", str(tmp_path / "runs"), "--limit-s", "60"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        printed, _ = soak.communicate(timeout=LIMIT_S)
    finally:
        # Not SIGKILL: it ends the cluster and the driver that it has started.
        soak.terminate()
        soak.wait(60)
    assert soak.returncode == 0, printed
    result = json.loads(report.read_text())
    assert result["faults"] >= 2, "too few faults in the time"
    assert result["driver_deaths"] == 0, result["driver_deaths_after"]
    assert result["checksum_equal"]
    assert (result["groups_lost"], result["groups_doubled"]) == (0, 0)
    assert result["evaluations_equal"], "a network evaluation was counted twice, or not at all"
    assert result["sigterm"]["exit_code"] == 85
    assert not any(result["leaks"].values()), result["leaks"]
