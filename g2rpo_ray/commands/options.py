"""What several commands take: a configuration, a run, numbers; no heavy library.

A command's module has ``HELP``, ``add_options(parser)`` and ``run(options)``, which returns an exit
code or None. All modules are imported whenever ``g2rpo`` starts: heavy imports stand in ``run``,
after the configuration is read, so that an error in it is told at once.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import replace_text, writing

if TYPE_CHECKING:
    from g2rpo_ray.config import Config

T = TypeVar("T")


def add_config(parser: argparse.ArgumentParser, words: str = "YAML file, see configs/") -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help=words)


def add_run(parser: argparse.ArgumentParser, names: str, others: str) -> None:
    """Options that say which weights of a run are meant.

    Args:
        names: what ``--checkpoint`` takes.
        others: the same in words, without the default.
    """
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run")
    parser.add_argument(
        "--checkpoint",
        default="last",
        metavar=names,
        help=f"weights: the run's last checkpoint (default), {others}",
    )
    parser.add_argument(
        "--average",
        action="store_true",
        help="of a checkpoint: the weights' moving average (learner.ema_decay)",
    )


def read_config(options: argparse.Namespace) -> "Config":
    """The configuration of ``add_config`` with its overrides."""
    return _load(options.config, options.overrides)


def read_run_config(options: argparse.Namespace) -> "Config":
    """Of a run's folder, or of a configuration file where there is no run yet."""
    path: Path = options.run_dir
    if path.is_file():
        return _load(path, options.overrides)
    config = _load(path / "config.yaml", options.overrides)
    # Not the folder that it was trained in: it may have been copied or renamed since.
    return config.model_copy(update={"run_dir": str(path.absolute())})


def _load(path: Path, overrides: Sequence[str]) -> "Config":
    from g2rpo_ray.config import load_config
    from g2rpo_ray.run.paths import with_folder

    return with_folder(load_config(path, overrides), path, overrides)


def write_json(path: Path | None, content: object) -> None:
    """What ``--json`` asks for, if it was given.

    Raises:
        InputError: the file cannot be written.
    """
    if path is None:
        return
    with writing(path, InputError, "--json"):
        # A device, such as /dev/stdout, is written to and not replaced.
        write = Path.write_text if path.exists() and not path.is_file() else replace_text
        write(path, json.dumps(content, indent=1))


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def size(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*(KB|MB|GB|TB)", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected such as 500MB or 10GB")
    return text


def numbers(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A comma-separated list of ``int`` or ``float``."""

    def read(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    read.__name__ = f"comma-separated {kind.__name__}"
    return read
