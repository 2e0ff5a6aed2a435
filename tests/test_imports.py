"""What a process imports: a command's help and a check of settings need no large library."""

import subprocess
import sys
from pathlib import Path

import pytest

from g2rpo_ray.cli import COMMANDS

ROOT = Path(__file__).parents[1]
LARGE = ("torch", "ray", "diffusers", "transformers", "deepspeed", "peft", "open_clip", "numpy",
         "pyarrow", "pandas", "safetensors.torch", "huggingface_hub")  # fmt: skip


def large_after(code: str) -> str:
    """Large libraries that a new Python has imported after ``code``; it may leave by SystemExit."""
    script = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
        f"print('imported:', *[name for name in {LARGE!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.rpartition("imported:")[2].strip()


@pytest.mark.parametrize("command", ["", *(m.__name__.rpartition(".")[2] for m in COMMANDS)])
def test_help_imports_no_large_library(command: str) -> None:
    arguments = [command, "--help"] if command else ["--help"]

    assert large_after(f"from g2rpo_ray.cli import main; main({arguments!r})") == ""


@pytest.mark.parametrize("override", ["wrong.key=1", "rewards.clip.options.dtype=int4"])
def test_an_error_in_the_settings_is_found_without_a_large_library(override: str) -> None:
    arguments = ["train", "configs/quickstart.yaml", override]

    assert large_after(f"from g2rpo_ray.cli import main; assert main({arguments!r}) == 2") == ""
