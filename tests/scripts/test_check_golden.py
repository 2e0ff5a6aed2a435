"""The maths and the rollout engine against tests/golden, through the script that users run."""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.scripts.loading import load_script

SECTIONS = [
    "schedules",
    "sde steps",
    "completion grids",
    "evaluation counts",
    "advantages",
    "loss and gradient",
    "whole rollout",
]
ROLLOUT = 2e-6
"""The golden numbers' own float32: two of 128 frequencies that their CPU rounded one bit off move
latents by 1.66e-6. Ours are float64, alike to 1e-15 on another CPU's kernels."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("check_golden")


@pytest.mark.parametrize("section", SECTIONS)
def test_section_agrees(section: str, script: ModuleType, golden_dir: Path) -> None:
    errors = list(script.SECTIONS[section](script.Golden.read(golden_dir)))
    assert errors
    assert max(errors) <= (ROLLOUT if section == "whole rollout" else 1e-6)


def test_every_section_is_tested(script: ModuleType) -> None:
    assert list(script.SECTIONS) == SECTIONS


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_rollout_agrees_for_any_batch_size(
    batch_size: int, script: ModuleType, golden_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "BATCH_SIZE", batch_size)
    assert max(script.whole_rollout(script.Golden.read(golden_dir))) <= ROLLOUT


def test_the_rollout_is_alike_where_last_bits_are_others(
    script: ModuleType, golden_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, exp = script.Golden.read(golden_dir), torch.exp
    here = list(script.whole_rollout(golden))

    def exp_of_another_cpu(x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(exp(x), torch.tensor(torch.inf, dtype=x.dtype))

    monkeypatch.setattr(torch, "exp", exp_of_another_cpu)
    # Every sum in another order.
    monkeypatch.setattr(script, "BATCH_SIZE", 5)
    assert list(script.whole_rollout(golden)) == pytest.approx(here, rel=1e-6)


@pytest.mark.parametrize("added", [1e-2, float("nan")])
@pytest.mark.parametrize(
    ("file", "key", "section"),
    [
        ("math.safetensors", "sde.flow.7.mean", "sde steps"),
        ("math.safetensors", "advantages.integrated", "advantages"),
        ("math.safetensors", "loss.0.2.grad", "loss and gradient"),
        ("rollout.safetensors", "completion_x0", "whole rollout"),
    ],
)
def test_a_changed_number_is_found(
    file: str,
    key: str,
    section: str,
    added: float,
    script: ModuleType,
    golden_dir: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(golden_dir, tmp_path / "golden")
    tensors = load_file(tmp_path / "golden" / file)
    tensors[key].view(-1)[0] += added
    save_file(tensors, tmp_path / "golden" / file)
    report = script.check(tmp_path / "golden")
    wrong = [name for name, row in report.items() if row["max_relative_error"] > script.TOLERANCE]
    assert wrong == [section]


def test_a_number_that_is_none_is_found(script: ModuleType) -> None:
    assert script.relative_error_of(1.0, float("nan")) == float("inf")
    assert script.relative_error_of(float("nan"), 1.0) == float("inf")
    assert script.relative_error_of(3, 4) == 0.25


def test_a_folder_that_is_not_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_golden.py", str(tmp_path / "nowhere")])
    assert script.main() == 2
