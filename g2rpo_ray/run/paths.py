"""Where a run lies."""

from collections.abc import Sequence
from pathlib import Path

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config

SETTINGS, RESOLVED, VERSIONS = "config.yaml", "resolved.yaml", "versions.json"
"""Of a run's folder: what it was started with, what a dry run would start with, packages."""


class RunFolderError(InputError):
    """The run folder cannot be used as asked; the message says what to do."""


def run_folder(config: Config) -> Path:
    """``run_dir``, absolute."""
    return Path(config.run_dir).expanduser().absolute()


def with_folder(config: Config, settings: Path, overrides: Sequence[str] = ()) -> Config:
    """``config`` with an absolute ``run_dir``: for a run's own file the folder where that lies.

    A run may have been moved, copied or renamed since, or have been started from another folder.

    Args:
        settings: the file that ``config`` was read from.
        overrides: what was given beside it; a ``run_dir`` there is what was asked for.
    """
    folder = settings.expanduser().absolute().parent
    is_own = settings.name in (SETTINGS, RESOLVED) and (folder / VERSIONS).is_file()
    if not is_own or any(override.startswith("run_dir=") for override in overrides):
        folder = run_folder(config)
    if ".." in folder.parts:
        # What it goes up from need not stay there.
        folder = folder.resolve()
    return config.model_copy(update={"run_dir": str(folder)})
