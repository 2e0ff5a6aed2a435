"""cluster/slurm on a real Slurm: the time limit's signal, requeue, resume; failures that show."""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from g2rpo_ray.config import Config, config_from_dict, save_config
from g2rpo_ray.tracking.metrics import read_metrics
from tests.cluster.slurm import Slurm, missing_programs, private_slurm
from tests.integration.command import train, wait_until
from tests.tiny import ALONE, tiny_config

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.long,
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"needs {', '.join(missing_programs())}: as root, apt-get install "
        "--no-install-recommends slurmctld slurmd slurm-client munge",
    ),
]

PROJECT = Path(__file__).parents[2]
MORE_ITERATIONS = 2


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # Not pytest's folder: the paths of munge's and Ray's sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="g2rpo-slurm-"))
    with private_slurm(folder) as running:
        yield running
    shutil.rmtree(folder)


def settings(run_dir: Path, iterations: int) -> Config:
    tree = tiny_config(
        run_dir,
        f"iterations={iterations}",
        "rollout.workers=1",
        "learner.ranks=1",
        "checkpoint.every=1000",
    ).model_dump()
    return config_from_dict(
        tree | {"rewards": {"clip": tree["rewards"]["clip"] | ALONE}}, source="test"
    )


def trained(run_dir: Path) -> int:
    if not (run_dir / "metrics.jsonl").exists():
        return 0
    return sum(record["kind"] == "train" for record in read_metrics(run_dir))


def checksum(run_dir: Path) -> str:
    return str(json.loads((run_dir / "summary.json").read_text())["weights_checksum"])


def limit_soon(slurm: Slurm, job: str, elapsed_s: float) -> None:
    """Move the job's time limit to one or two minutes from now."""
    minutes = math.ceil(elapsed_s / 60) + 1
    slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")


def test_time_limit_requeue_and_resume_end_as_if_nothing_had_been(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-a-test")
    run_dir, file = slurm.folder / "run", slurm.folder / "settings.yaml"
    # More than the time limit leaves room for.
    save_config(settings(run_dir, 5000), file)
    job = slurm.submit(
        "train.sbatch", str(file), str(run_dir),
        options=("--nodes=2", "--time=10", "--signal=B:USR1@120"),
    )  # fmt: skip
    wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", "the job to start", 60, 0.5)
    started_s = time.monotonic()
    wait_until(
        lambda: trained(run_dir) > 0 or slurm.job(job)["JobState"] == "FAILED",
        "the first iteration", 300, 1.0,
    )  # fmt: skip
    said = [line for line in slurm.log(job).splitlines() if "metrics: " in line]
    assert Path(said[0].split()[2]).is_file(), said
    limit_soon(slurm, job, time.monotonic() - started_s)
    wait_until(lambda: slurm.job(job)["Restarts"] == "1", "the requeue", 120, 0.5)
    iterations = trained(run_dir) + MORE_ITERATIONS
    save_config(settings(run_dir, iterations), file)
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=10")

    ended, log = slurm.wait(job), slurm.log(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), (
        log
    )
    assert f"requeued after iteration_{iterations - MORE_ITERATIONS:06d}" in log
    assert "the cluster has 4 CPU, 0 GPU on 2 nodes" in log
    assert "dashboard: ssh -L 8265:127.0.0.1:" in log
    assert trained(run_dir) == iterations
    for life in (0, 1):
        logs = run_dir / "logs" / f"job_{job}.{life}"
        assert {path.name for path in logs.iterdir()} == {"n1", "n2"}
        assert (logs / "n1" / "gcs_server.out").exists()
        assert (logs / "n2" / "raylet.out").exists()
    assert not list(Path("/tmp").glob(f"g2rpo-{job}-*"))
    token = run_dir / "slurm" / "token"
    assert token.stat().st_mode & 0o077 == 0
    secrets = [token.read_text().strip().encode(), b"secret-of-a-test"]
    for path in [p for p in run_dir.rglob("*") if p.is_file() and p != token]:
        assert not any(secret in path.read_bytes() for secret in secrets), path

    uninterrupted = train(settings(slurm.folder / "uninterrupted", iterations))
    assert uninterrupted.wait() == 0, uninterrupted.text
    assert checksum(slurm.folder / "uninterrupted") == checksum(run_dir)


def test_a_failing_driver_is_a_failing_job(slurm: Slurm) -> None:
    job = slurm.submit(
        "train.sbatch", "/no/settings.yaml", str(slurm.folder / "failing"),
        options=("--time=5", "--signal=B:USR1@60"),
    )  # fmt: skip
    ended, log = slurm.wait(job), slurm.log(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0"), log
    assert "/no/settings.yaml: no such configuration file" in log


def workers_now(run_dir: Path) -> float:
    records = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    return next((r["rollout/workers"] for r in reversed(records) if "rollout/workers" in r), 0)


def test_a_node_joins_a_run_and_leaves_it_and_paths_may_hold_blanks(slurm: Slurm) -> None:
    run_dir, home = slurm.folder / "a run", slurm.folder / "the project"
    home.symlink_to(PROJECT)
    tree = settings(run_dir, 5000).model_dump()
    # The second worker has room on another node only.
    tree["rollout"] |= {"max_workers": 2, "cpus_per_worker": 1.2}
    save_config(config_from_dict(tree, source="test"), slurm.folder / "a file.yaml")
    exported = f"--export=ALL,G2RPO_HOME={home}"
    job = slurm.submit(
        "train.sbatch", str(slurm.folder / "a file.yaml"), str(run_dir),
        options=("--nodes=1", "--time=20", exported),
    )  # fmt: skip
    wait_until(
        lambda: workers_now(run_dir) == 1 or slurm.job(job)["JobState"] == "FAILED",
        "the first iteration", 300, 1.0,
    )  # fmt: skip
    joined = slurm.submit(
        "join.sbatch", str(run_dir), options=("--array=0-0", "--time=20", exported)
    )
    wait_until(lambda: workers_now(run_dir) == 2, "the second worker", 240, 1.0)
    slurm.call("scancel", joined)
    wait_until(lambda: workers_now(run_dir) == 1, "the second worker to leave", 240, 1.0)
    before = trained(run_dir)
    wait_until(lambda: trained(run_dir) > before, "the run to go on", 120, 1.0)
    assert (run_dir / "logs" / f"join_{slurm.job(joined)['JobId']}").is_dir()
    slurm.call("scancel", job)
    slurm.wait(job)


def test_joining_a_run_that_is_not_there_says_so(slurm: Slurm) -> None:
    (slurm.folder / "gone" / "slurm").mkdir(parents=True)
    (slurm.folder / "gone" / "slurm" / "head").write_text("127.0.0.1:1\n")
    job = slurm.submit("join.sbatch", str(slurm.folder / "gone"), options=("--time=5",))
    assert slurm.wait(job)["JobState"] == "FAILED"
    assert "nobody answers at 127.0.0.1:1" in slurm.log(job)
