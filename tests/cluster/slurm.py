"""A private Slurm on this machine: munge, a controller and two virtual nodes in one folder."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.command import ROOT, wait_until

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "scontrol",
    "scancel",
    "srun",
    "sinfo",
    "squeue",
)
CLIENT_TIMEOUT_S = 60.0
"""Without a controller Slurm's clients would hang."""

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# A requeued job may start when its credential has expired: after 6 s instead of two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=10
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def missing_programs() -> list[str]:
    """Programs of Slurm and munge that are not installed; none, if root can start them all."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    return missing or ([] if os.geteuid() == 0 else ["root's rights"])


@dataclass
class Slurm:
    """A running Slurm, and its clients."""

    folder: Path

    def call(self, *command: str) -> str:
        """Output of a client."""
        ended = subprocess.run(
            command,
            env=self.environment,
            cwd=ROOT,
            timeout=CLIENT_TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def submit(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
        """Job id of a script of cluster/slurm."""
        return self.call(
            "sbatch", "--parsable", f"--output={self.folder}/job-%j.log", *options,
            f"cluster/slurm/{script}", *arguments,
        )  # fmt: skip

    def job(self, job_id: str) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        words = self.call("scontrol", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self, job_id: str) -> str:
        path = self.folder / f"job-{job_id}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, job_id: str, timeout_s: float = 400.0) -> dict[str, str]:
        """The job, when it has ended for good."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        wait_until(
            lambda: self.job(job_id)["JobState"] in over, f"job {job_id} to end", timeout_s, 1.0
        )
        return self.job(job_id)

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
        return kept | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "G2RPO_PYTHON": sys.executable,
            "G2RPO_HOME": str(ROOT),
            "G2RPO_RAY_OPTIONS": "--object-store-memory=200000000 --num-gpus=0",
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }


@contextmanager
def private_slurm(folder: Path) -> Iterator[Slurm]:
    """Start munge, then the controller, then two nodes; end exactly those."""
    slurm = Slurm(folder)
    ports = free_ports(3)
    conf = CONF.format(host=socket.gethostname(), folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(conf)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    munged = [
        f"--{key}={folder}/munge.{key.removesuffix('-file')}"
        for key in ("socket", "key-file", "pid-file", "log-file", "seed-file")
    ]
    with ExitStack() as daemons:
        start = lambda *command: daemons.enter_context(_daemon(slurm, *command))  # noqa: E731
        # Forced: pytest's folders are closed to other users, which munge minds.
        start("munged", "--foreground", "--force", *munged)
        wait_until((folder / "munge.socket").exists, "munge's socket", 30)
        start("slurmctld", "-D")
        for name in ("n1", "n2"):
            start("slurmd", "-D", "-N", name)
        wait_until(
            lambda: slurm.call("sinfo", "--noheader", "-o", "%T").split() == ["idle"],
            "two idle nodes",
            60,
            0.5,
        )
        yield slurm
        for job in slurm.call("squeue", "--noheader", "-o", "%A").split():
            slurm.call("scancel", "--signal=KILL", "--full", job)
            slurm.call("scancel", job)
            slurm.wait(job, 60)


@contextmanager
def _daemon(slurm: Slurm, *command: str) -> Iterator[None]:
    with (slurm.folder / f"{command[0]}{command[-1]:.3}.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=slurm.environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            time.sleep(0.2)
            assert process.poll() is None, f"{command} ended: {log.name}"
            yield
        finally:
            process.terminate()
            process.wait(30)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
