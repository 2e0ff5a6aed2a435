"""The scorers' benchmark runs on the CPU; a model of true size is for a card."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_scorers.py"


@pytest.mark.slow
def test_drawn_signs_are_read(tmp_path: Path) -> None:
    pytest.importorskip("rapidocr", reason="needs g2rpo-ray[ocr], which [dev] has")
    assert _measured(tmp_path, "ocr", "--side", "256")["mean_score"] > 0.9


@pytest.mark.parametrize("kind", ["composition", "hpsv3"])
def test_small_models_run_on_the_cpu(tmp_path: Path, kind: str) -> None:
    content = _measured(tmp_path, kind, "--side", "64", "--tiny")
    assert (content["kind"], content["device"]) == (kind, "cpu")
    assert content["seconds"] > 0


def _measured(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), *arguments, "--pictures", "6", "--batch-size", "4",
               "--repeats", "1", "--json", str(folder / "scorers.json")]  # fmt: skip
    no_card = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, env=no_card, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads((folder / "scorers.json").read_text())
    assert content["pictures"] == 6
    return content
