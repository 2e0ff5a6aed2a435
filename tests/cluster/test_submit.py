"""cluster/submit.py: what travels with a job; the submission itself is in test_raylets.py."""

import runpy
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private.runtime_env.packaging import create_package

PROJECT = Path(__file__).parents[2]

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
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    left_here = runpy.run_path(str(PROJECT / "cluster" / "submit.py"))["LEFT_HERE"]
    assert packed(project, left_here) == TRAVELS


def test_git_ignores_what_is_large_and_not_the_package(project: Path) -> None:
    # Ray heeds it, too: also for `ray job submit --working-dir .`
    (project / ".gitignore").write_text((PROJECT / ".gitignore").read_text())
    names = packed(project, excludes=[])
    assert names >= TRAVELS
    assert not names & LARGE
