"""The rooms of the package: their order, their one line each, and that the order is enforced."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "g2rpo_ray"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
(LAYERS,) = (c["layers"] for c in CONTRACTS["contracts"] if c["type"] == "layers")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()",
         "--no-cache"],
        cwd=root, env=os.environ | {"PYTHONPATH": path, "COLUMNS": "300"}, capture_output=True,
        text=True,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        PACKAGE, tmp_path / "g2rpo_ray", ignore=shutil.ignore_patterns("assets", "__pycache__")
    )
    return tmp_path


def test_the_package_keeps_to_the_order() -> None:
    answer = lint_imports(ROOT)

    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "from g2rpo_ray.training import settings",
        "def later() -> None:\n    from g2rpo_ray.training import settings",
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from g2rpo_ray.training import settings",
    ],
    ids=["at the top", "in a function", "for the type checker"],
)
def test_an_import_against_the_order_fails_and_names_both_files(copy: Path, statement: str) -> None:
    noise = copy / "g2rpo_ray" / "maths" / "noise.py"
    noise.write_text(noise.read_text() + f"\n\n{statement}\n")

    answer = lint_imports(copy)

    assert answer.returncode != 0
    assert "g2rpo_ray.maths.noise -> g2rpo_ray.training.settings" in " ".join(answer.stdout.split())


def test_a_circle_inside_a_room_fails_and_names_both_files(copy: Path) -> None:
    noise = copy / "g2rpo_ray" / "maths" / "noise.py"
    noise.write_text(noise.read_text() + "\n\nfrom g2rpo_ray.maths import step_choice\n")

    answer = lint_imports(copy)

    assert answer.returncode != 0
    assert "No cycles are allowed in g2rpo_ray.maths" in answer.stdout
    assert ".noise" in answer.stdout
    assert ".step_choice" in answer.stdout


def test_there_are_few_rooms_and_only_the_command_line_beside_them() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}

    assert modules == {"cli"}
    assert len(rooms) <= 20
    assert sorted(LAYERS) == sorted(rooms | modules)


def test_contributing_lists_the_rooms_in_their_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()

    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, re.MULTILINE)

    assert listed == LAYERS


def test_every_room_says_in_one_line_what_it_is_for() -> None:
    for room in PACKAGE.rglob("__init__.py"):
        first = room.read_text().partition("\n")[0]
        assert first.startswith('"""'), f"{room}: its first line is no docstring"
        assert 30 < len(first) <= 100, f"{room}: {first}"
