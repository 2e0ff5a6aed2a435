"""cluster/slurm without Slurm: what its scripts must agree on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "cluster" / "slurm"


def line_of(script: str, start: str) -> str:
    (line,) = [x for x in (SLURM / script).read_text().splitlines() if x.startswith(start)]
    return line


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        ([], {}, "CONFIG is missing"),
        (["c.yaml"], {}, "RUN_DIR is missing"),
        (["c.yaml", "a run"], {"G2RPO_PYTHON": "/no/python"}, "G2RPO_PYTHON=/no/python: no such"),
        (["c.yaml", "a run"], {"SLURM_SUBMIT_DIR": "/tmp"}, "/tmp/cluster/slurm/node.sh is not"),
        (["c.yaml", "/proc/x"], {}, "RUN_DIR /proc/x cannot be written"),
    ],
)
def test_train_names_what_is_wrong_before_it_starts_anything(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], named: str
) -> None:
    slurm = {"SLURM_JOB_ID": "42", "SLURM_SUBMIT_DIR": str(SLURM.parents[1])}
    environment = os.environ | {"G2RPO_PYTHON": sys.executable} | slurm | variables
    done = subprocess.run(
        ["bash", SLURM / "train.sbatch", *arguments],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert named in done.stderr.splitlines()[-1]


def test_train_says_where_the_head_lists_its_metrics() -> None:
    # As Slurm numbers the first node of a job's first step, the head.
    numbers = "SLURM_JOB_ID=42 SLURM_STEP_ID=0 SLURM_NODEID=0"
    parts = [numbers, line_of("node.sh", "temp="), "echo $temp", "say() { echo $*; }"]
    script = "\n".join([*parts, line_of("train.sbatch", 'say "metrics:')])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    temp, said = done.stdout.splitlines()
    assert f"{temp}/session_latest/prom_metrics_service_discovery.json" in said.split()
