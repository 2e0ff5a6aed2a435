"""Where a run lies, and where nothing may be written."""

import os
from collections.abc import Sequence
from pathlib import Path

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config

SETTINGS, RESOLVED, VERSIONS = "config.yaml", "resolved.yaml", "versions.json"
"""Of a run's folder: what it was started with, what a dry run would start with, packages."""

OF_STATES = ("checkpoints", "snapshots")
"""Folders of a run's states, in which it deletes; learner/checkpoints, whose names they are, brings
torch, and the command line does without."""


class RunFolderError(InputError):
    """The run folder cannot be used as asked; the message says what to do."""


def run_folder(config: Config) -> Path:
    """``run_dir``, absolute."""
    return Path(config.run_dir).expanduser().absolute()


def check_outside_states(folder: Path, refused: type[InputError], asked: str) -> None:
    """Nothing of its own may lie in a checkpoint, or among a run's: the run deletes them.

    Args:
        folder: to be written, which need not be there yet; links are followed.
        asked: setting or option that names it.

    Raises:
        refused: it is a checkpoint, or is or lies in a run's ``checkpoints`` or ``snapshots``.
    """
    # os.path's functions: Path's raise where a name is too long, or a folder may not be read.
    real = Path(os.path.realpath(folder))
    for place in (real, *real.parents):
        own = (place.parent / SETTINGS, place.parent / VERSIONS)
        in_run = place.name in OF_STATES and all(map(os.path.isfile, own))
        # Others' folders have a state.json, too.
        is_state = os.path.isfile(place / "state.json") and any(place.glob("trainable-*"))  # noqa: PTH113
        if in_run or is_state:
            what = f"the run {place.parent} deletes in it" if in_run else "it is a checkpoint"
            raise refused(
                f"{asked} {folder}: {'is' if place == real else 'lies in'} {place}, and {what}; "
                "name a folder outside of checkpoints and of a run's "
                f"{' and '.join(OF_STATES)}"
            )


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
