"""cluster/slurm without Slurm: what its scripts must agree on."""

import subprocess
from pathlib import Path

SLURM = Path(__file__).parents[2] / "cluster" / "slurm"


def line_of(script: str, start: str) -> str:
    (line,) = [x for x in (SLURM / script).read_text().splitlines() if x.startswith(start)]
    return line


def test_train_says_where_the_head_lists_its_metrics() -> None:
    # As Slurm numbers the first node of a job's first step, the head.
    numbers = "SLURM_JOB_ID=42 SLURM_STEP_ID=0 SLURM_NODEID=0"
    parts = [numbers, line_of("node.sh", "temp="), "echo $temp", "say() { echo $*; }"]
    script = "\n".join([*parts, line_of("train.sbatch", 'say "metrics:')])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    temp, said = done.stdout.splitlines()
    assert f"{temp}/session_latest/prom_metrics_service_discovery.json" in said.split()
