"""Packages that need old versions of what is here, in an environment of their own."""

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest


def environment(folder: Path, packages: Sequence[str]) -> Path:
    """A Python with these packages before this environment's own, or the test is skipped."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    result = subprocess.run(
        [*install, *packages], capture_output=True, text=True, timeout=480, check=False
    )
    if result.returncode != 0:
        pytest.skip(f"{', '.join(packages)} are not to be had here: {result.stderr[-200:]}")
    return python
