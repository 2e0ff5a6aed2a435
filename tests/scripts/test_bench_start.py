"""No role of a real run has imported a large library that it does not need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import QUICKSTART, SMALL

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_start.py"
NOT_NEEDED = {
    "driver": {"torch._dynamo", "diffusers", "transformers", "peft", "deepspeed", "open_clip"},
    "reward": {"diffusers", "peft", "deepspeed"},
    "worker": {"deepspeed", "open_clip"},
    "rank": {"open_clip"},
}


@pytest.mark.long
def test_every_role_has_only_the_large_libraries_that_it_needs(tmp_path: Path) -> None:
    found = tmp_path / "start.json"
    overrides = [f"run_dir={tmp_path}/run", *SMALL]
    subprocess.run(
        [sys.executable, SCRIPT, QUICKSTART, *overrides, "--json", found], cwd=tmp_path, check=True
    )
    roles = json.loads(found.read_text())["roles"]
    assert sorted(roles) == [
        "driver", "rank 0", "rank 1", "reward hps", "worker 0", "worker 1",
    ]  # fmt: skip
    for name, role in roles.items():
        assert not NOT_NEEDED[name.split()[0]] & set(role["large"]), name
