#!/usr/bin/env python3
"""Submits a training to a running Ray cluster, follows its log, and ends with its exit code.

    python cluster/submit.py CONFIG RUN_DIR [key.sub=value ...] [--address URL] [--id ID]

The project's code travels with the job; RUN_DIR is a path on the cluster, on shared storage.
Ctrl-C ends only the following. Exit codes are those of ``g2rpo train``; 2 also where nothing was
submitted.
"""

import argparse
import asyncio
import logging
import os
import re
import shlex
import sys
import time
from pathlib import Path

import yaml
from aiohttp import ClientError
from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

ROOT = Path(__file__).resolve().parents[1]
# It runs where this package is not installed, too.
sys.path.insert(0, str(ROOT))
from g2rpo_ray.common.secrets import REMEDY, looks_secret, secrets_in  # noqa: E402

LEFT_HERE = [
    ".git", ".venv", ".*_cache", "__pycache__", "runs", "docs", "tests",
    # With the slash: in this folder alone, and not the package's own g2rpo_ray/models.
    "/models", "/data", "/samples",
]  # fmt: skip
"""What stays behind: Ray reads and hashes all the rest before it refuses what is too large."""
POLL_S = 1.0
UNREACHABLE = (OSError, RuntimeError, ValueError, RayError, ClientError)
"""What Ray's client raises; the errors of requests and of sockets are OSErrors."""
EXIT_FAILED, EXIT_NOT_SUBMITTED, EXIT_INTERRUPTED = 1, 2, 130


def main() -> int:
    """Submit, follow, and return the exit code."""
    options = _parse()
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray prefers these variables to the address given, and the job would go to another cluster.
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_API_SERVER_ADDRESS"] = options.address
    try:
        client = JobSubmissionClient(options.address)
        job = client.submit_job(
            entrypoint=_entrypoint(options),
            submission_id=options.id,
            runtime_env={
                "working_dir": str(ROOT),
                "excludes": LEFT_HERE,
                "env_vars": {name: os.environ[name] for name in options.env},
            },
            metadata={"config": str(options.config), "run_dir": str(options.run_dir)},
        )
    except UNREACHABLE as error:
        return _refuse(f"not submitted to {options.address}: {_cause(error)}")
    print(f"submit.py: job {job} at {options.address}", flush=True)
    try:
        asyncio.run(_follow(client, job))
        return _exit_code(client, job)
    except KeyboardInterrupt:
        print(
            f"submit.py: the job goes on. Follow it: ray job logs -f {job}; stop it with a "
            f"checkpoint: ray job stop {job}",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    except UNREACHABLE as error:
        print(
            f"submit.py: lost sight of job {job}, which may go on: {error}. Is the head there? "
            f"Follow it again: ray job logs -f {job}",
            file=sys.stderr,
        )
        return EXIT_FAILED


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file inside this folder")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="absolute, on shared storage")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265"),
        help="Ray's dashboard (RAY_API_SERVER_ADDRESS, or http://127.0.0.1:8265)",
    )
    parser.add_argument("--id", default=None, help="submission id (made from the time)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable of this shell that the driver gets, too; may be given repeatedly",
    )
    # argparse takes the settings in one place only; people write them before and after options.
    options = parser.parse_intermixed_args()
    # It becomes part of addresses: '#' or a blank in it would be somebody else's job, or none.
    name = re.sub(r"[^\w.-]+", "-", options.run_dir.name, flags=re.ASCII)
    options.id = options.id or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    config = options.config.resolve()
    if not config.is_file() or not config.is_relative_to(ROOT):
        sys.exit(_refuse(f"CONFIG {options.config}: no file inside {ROOT}, which travels"))
    options.config = config.relative_to(ROOT)
    if not options.run_dir.is_absolute():
        sys.exit(
            _refuse(
                f"RUN_DIR {options.run_dir}: give an absolute path on the cluster's shared "
                "storage; a relative one would vanish with the job's copy of the code"
            )
        )
    for key, _, value in (override.partition("=") for override in options.overrides):
        # Ray's dashboard shows the whole command.
        try:
            setting = yaml.safe_load(value)
        except yaml.YAMLError:
            setting = value
        for found in secrets_in({key: setting}):
            sys.exit(_refuse(f"{found}. {REMEDY}"))
    for name in options.env:
        if looks_secret(name):
            sys.exit(_refuse(f"--env {name} looks like a secret; Ray's dashboard would show it. "
                             "Set it in the head node's environment instead"))  # fmt: skip
        if name not in os.environ:
            sys.exit(_refuse(f"--env {name}: not set in this shell"))


def _refuse(reason: str) -> int:
    print(f"submit.py: {reason}", file=sys.stderr)
    return EXIT_NOT_SUBMITTED


def _cause(error: Exception) -> str:
    """The head answers with the traceback of its own error; its last line is what helps."""
    lines = [line for line in str(error).splitlines() if len(line) > 1]
    return lines[-1] if "Traceback" in str(error) else " ".join(lines)


def _entrypoint(options: argparse.Namespace) -> str:
    command = ["python", "-m", "g2rpo_ray.cli", "train", str(options.config), "--resume", "auto"]
    return shlex.join([*command, f"run_dir={options.run_dir}", *options.overrides])


async def _follow(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def _exit_code(client: JobSubmissionClient, job: str) -> int:
    """The driver's own, which ``ray job submit`` turns into 1."""
    # The log may end a moment before the status is final.
    while not (info := client.get_job_info(job)).status.is_terminal():
        time.sleep(POLL_S)
    print(f"submit.py: job {job} {info.status}", file=sys.stderr)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    # The message repeats the log's end, which was just shown.
    print(f"submit.py: {(info.message or '').partition(', last available')[0]}", file=sys.stderr)
    return info.driver_exit_code or EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
