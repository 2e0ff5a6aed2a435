"""``g2rpo``: the command line."""

import argparse
import errno
import re
import signal
import sys
import threading
from collections.abc import Sequence
from io import TextIOWrapper

from g2rpo_ray import __version__
from g2rpo_ray.commands import (
    demo,
    doctor,
    download,
    embed,
    evaluate,
    export,
    plan,
    sample,
    score,
    train,
)
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.common.files import disk_fault
from g2rpo_ray.common.secrets import redacted
from g2rpo_ray.common.stop import StopRequested

COMMANDS = (train, sample, demo, export, evaluate, score, download, embed, plan, doctor)
"""In the order of ``g2rpo --help``; ``commands/options.py`` says what a module has."""

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells say it: 128 and the signal's number."""
EXIT_REQUEUE = 85
"""SIGTERM or SIGUSR1 (preemption, a time limit): a checkpoint is written, start it again."""
REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""What the system says of a path that was given where it does not even look at it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0 done, 1 failed, 2 bad input, 130 or 85 after a signal."""
    # A terminal that knows no é shows \xe9; the command does not end for it.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else arguments
    threading.excepthook = _in_a_thread
    try:
        for argument, option in zip(arguments, ("", *arguments), strict=False):
            argument.encode()
            named = argument or option or "argument"
            is_empty = not argument or re.fullmatch("--[a-z-]+=", argument)
            # A path of no characters would be the folder that the command runs in; prompts are
            # judged by who draws them.
            if is_empty and named not in ("--prompt", "--prompt="):
                raise InputError(f"{named}: empty; it needs a value")
        options = _parse(arguments)
        return options.run(options) or EXIT_DONE
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":
            raise
        # What stands for bytes that Python could not read; no tokenizer and no file takes it.
        print(
            f"g2rpo: {error.object!a:.200}: not text in this terminal's encoding "
            f"({sys.getfilesystemencoding()}); give UTF-8, with PYTHONUTF8=1 where that is another",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    except StopRequested as request:
        return EXIT_INTERRUPTED if request.signal_number == signal.SIGINT else EXIT_REQUEUE
    except KeyboardInterrupt:
        print("g2rpo: stopped at once", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        # Any file of a command may be the one that meets a full or read-only disk.
        is_disk = disk_fault(error) is not None
        if isinstance(error, OSError) and error.filename and error.errno in REFUSED:
            print(redacted(f"g2rpo: {error.filename}: {error.strerror}"), file=sys.stderr)
            return EXIT_BAD_INPUT
        if not isinstance(error, InputError | RunError) and not is_disk:
            raise
        # The text of an error from a Ray task has the remote traceback; its cause is what helps.
        print(redacted(f"g2rpo: {getattr(error, 'cause', error)}"), file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, InputError) and not is_disk else EXIT_FAILED


def _in_a_thread(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread prints a traceback of a full disk, which its caller then tells again."""
    if disk_fault(failed.exc_value) is None:
        threading.__excepthook__(failed)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="g2rpo", description="Online RL for image models on a Ray cluster."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        command = commands.add_parser(module.__name__.rpartition(".")[2], help=module.HELP)
        module.add_options(command)
        command.add_argument(
            "overrides",
            nargs="*",
            default=[],  # without it, argparse's messages call them required
            metavar="key.sub=value",
            help="settings that replace the file's",
        )
        command.set_defaults(run=module.run)
    # argparse takes overrides in one place only; people write them before and after options.
    options, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += rest
    return options


if __name__ == "__main__":
    sys.exit(main())
