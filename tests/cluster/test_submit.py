"""cluster/submit.py: what travels with a job, and a head that goes away; the submission itself is
in test_raylets.py."""

import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import aiohttp
import pytest
import requests
from ray._private.runtime_env.packaging import create_package

PROJECT = Path(__file__).parents[2]
CONFIG = str(PROJECT / "configs" / "quickstart.yaml")

TRAVELS = {
    "cluster/submit.py",
    "configs/quickstart.yaml",
    "g2rpo_ray/models/vae.py",
    "g2rpo_ray/plan/data/table.json",
}
LARGE = {
    "data/hpdv2_t5/part-0.parquet",
    "models/FLUX.1-dev/transformer/weights.safetensors",
    "runs/mine/metrics.jsonl",
    "samples/0.png",
}
STAYS = LARGE | {
    ".git/HEAD",
    ".venv/bin/python",
    "docs/data.md",
    "g2rpo_ray/__pycache__/cli.pyc",
    "tests/tiny.py",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """submit.py, imported anew."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    spec = importlib.util.spec_from_file_location("submit", PROJECT / "cluster" / "submit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Client:
    """Ray's client, of a head that goes away while the job is followed."""

    submitted: dict[str, Any]
    lost: type[Exception]

    def __init__(self, address: str) -> None:
        pass

    def submit_job(self, **job: Any) -> str:
        Client.submitted = job
        return str(job["submission_id"])

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        yield f"log of {job}\n"
        if self.lost is aiohttp.ClientError:
            raise self.lost("the connection")

    def get_job_info(self, job: str) -> None:
        raise self.lost(f"no answer for {job}")


@pytest.mark.parametrize(
    "override", ["rewards.a.options.api_key=hunter2", "rewards={a: {options: {api_key: hunter2}}}"]
)
def test_a_secret_among_the_settings_is_not_sent(
    script: ModuleType,
    override: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "JobSubmissionClient", None)
    monkeypatch.setattr(sys, "argv", ["submit.py", CONFIG, "/runs/mine", override])
    with pytest.raises(SystemExit) as caught:
        script.main()
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert "rewards.a.options.api_key looks like a secret" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("lost", [requests.exceptions.ConnectionError, aiohttp.ClientError])
def test_a_head_that_goes_away_is_named(
    script: ModuleType,
    lost: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "JobSubmissionClient", Client)
    monkeypatch.setattr(Client, "lost", lost, raising=False)
    monkeypatch.setattr(sys, "argv", ["submit.py", CONFIG, "/runs/mine", "--id", "first"])
    assert script.main() == 1
    said = capsys.readouterr()
    assert "log of first" in said.out
    assert "lost sight of job first, which may go on" in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        [CONFIG, "/runs/try #2", "--address", "http://head:8265", "seed=1", "iterations=3"],
        [CONFIG, "--address", "http://head:8265", "/runs/try #2", "seed=1", "iterations=3"],
        [CONFIG, "/runs/try #2", "seed=1", "--address", "http://head:8265", "iterations=3"],
    ],
)
def test_settings_may_stand_anywhere_and_the_id_fits_into_an_address(
    script: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "JobSubmissionClient", Client)
    monkeypatch.setattr(Client, "lost", OSError, raising=False)
    monkeypatch.setattr(sys, "argv", ["submit.py", *arguments])
    script.main()
    assert Client.submitted["entrypoint"].endswith(" seed=1 iterations=3")
    assert Client.submitted["submission_id"].startswith("try-2-")


def packed(project: Path, excludes: list[str]) -> set[str]:
    """What Ray's own packer puts into a job's working directory."""
    package = project.with_suffix(".zip")
    create_package(str(project), package, include_gitignore=True, excludes=excludes)
    with ZipFile(package) as content:
        return {name for name in content.namelist() if not name.endswith("/")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in TRAVELS | STAYS:
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("content")
    return tmp_path / "project"


def test_models_and_data_stay_here_and_the_package_travels(
    project: Path, script: ModuleType
) -> None:
    assert packed(project, script.LEFT_HERE) == TRAVELS


def test_git_ignores_what_is_large_and_not_the_package(project: Path) -> None:
    # Ray heeds it, too: also for `ray job submit --working-dir .`
    (project / ".gitignore").write_text((PROJECT / ".gitignore").read_text())
    names = packed(project, excludes=[])
    assert names >= TRAVELS
    assert not names & LARGE
