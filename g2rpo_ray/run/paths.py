"""Where a run lies."""

from pathlib import Path

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config


class RunFolderError(InputError):
    """The run folder cannot be used as asked; the message says what to do."""


def run_folder(config: Config) -> Path:
    """``run_dir``, absolute."""
    return Path(config.run_dir).expanduser().absolute()
