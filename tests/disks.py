"""File systems of a few kB, to be filled or made read-only: what a real one says, no imitation."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FILLER = "filler"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size``, such as ``96k``; skips where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system here: full disks are not tested")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, leave: int) -> None:
    """Leave so many bytes free."""
    (disk / FILLER).unlink(missing_ok=True)
    (disk / FILLER).write_bytes(bytes(shutil.disk_usage(disk).free - leave))


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def unreadable(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The system refuses to list it, which it never does to root."""
    for name in ("scandir", "listdir"):
        real = getattr(os, name)

        def listed(path: Any = ".", real: Any = real) -> Any:
            if Path(path) == folder:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        patch.setattr(os, name, listed)


def left(folder: Path) -> set[str]:
    """Files of a folder and below, but for the filler."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in files} - {FILLER}
