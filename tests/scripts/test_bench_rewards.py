"""The rewards' benchmark runs on the CPU and compares equal work."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_rewards.py"


def test_the_small_benchmark_gives_equal_scores(tmp_path: Path) -> None:
    out = tmp_path / "rewards.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--repeats", "2", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "one at a time" in result.stdout
    content = json.loads(out.read_text())
    exact = next(row for row in content["batched"] if row["dtype"] == "float32")
    assert exact["max_abs_score_difference"] < 1e-5
    assert exact["ratio"] > 0
    assert content["pictures"] == 24
