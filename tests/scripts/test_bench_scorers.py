"""The scorers' benchmark runs on the CPU; a model of true size is for a card."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_scorers.py"


def test_drawn_signs_are_read(tmp_path: Path) -> None:
    pytest.importorskip("rapidocr", reason="needs g2rpo-ray[ocr], which [dev] has")
    out = tmp_path / "scorers.json"
    command = [sys.executable, str(SCRIPT), "ocr", "--side", "256", "--pictures", "6",
               "--batch-size", "4", "--repeats", "1", "--json", str(out)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert content["pictures"] == 6
    assert content["mean_score"] > 0.9
