"""How a script ends: by its own exit code, or in words where something given cannot be used."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import cause_of, disk_fault


def output(text: str) -> Path:
    """For argparse: a file that is written at the end of hours, whose place is tried, and made, at
    once."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise argparse.ArgumentTypeError(f"{text!r}: a folder, or a file of others")
        if not path.exists():
            with TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        cause = cause_of(error, path)
        raise argparse.ArgumentTypeError(f"{text!r}: cannot be written: {cause}") from error
    return path


def run(main: Callable[[], int | None]) -> NoReturn:
    """Exit as ``main`` says; with 2 and what is wrong where a file or setting cannot be used, with
    1 where a disk is full or read-only."""
    try:
        sys.exit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if not error.filename:
            raise
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1 if disk_fault(error) else 2)
