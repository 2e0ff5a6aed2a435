import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.command import ROOT, python_path

OF_FLUX = ["flux/model_index.json", "flux/transformer/diffusion_pytorch_model.safetensors"]
OF_FLUX += ["prompts/heldout.txt", "README.md"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "rewards", "parts"),
    [
        ("tiny", {"clip", "hps"}, ["clip/open_clip_model.safetensors", "hps/HPS_tiny.pt"]),
        ("words", set(), []),
    ],
)
def test_a_quick_build_writes_every_part(
    tmp_path: Path, world: str, rewards: set[str], parts: list[str]
) -> None:
    figures = tmp_path / "figures.json"
    build = subprocess.run(
        [
            sys.executable,
            ROOT / "scripts" / "build_tiny_world.py",
            *("--out", tmp_path / "assets", "--json", figures, "--effort", "quick"),
            *("--world", world),
        ],
        env=os.environ
        | {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert build.returncode == 0, build.stderr[-2000:]
    result = json.loads(figures.read_text())
    assert set(result["seconds"]) == {"prompts", "vae", "flux", "measure"} | rewards
    for part in OF_FLUX + parts:
        assert (tmp_path / "assets" / part).is_file(), part
