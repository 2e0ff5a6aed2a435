"""``g2rpo``: the command line."""

import argparse
import sys
from collections.abc import Sequence

from g2rpo_ray import __version__
from g2rpo_ray.config import Config, ConfigError, load_config

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
SIGNAL_BASE = 128
"""Exit code after a signal is this plus its number, as shells do: 130 Ctrl-C, 143 SIGTERM."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 bad input, 128 + n on signal n."""
    options = _parser().parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        return int(options.run(config, options))
    except ConfigError as error:
        return _report(error, EXIT_BAD_INPUT)


def _train(config: Config, options: argparse.Namespace) -> int:
    from g2rpo_ray.arithmetic import describe
    from g2rpo_ray.launch import ClusterError
    from g2rpo_ray.learner.checkpoint import CheckpointError
    from g2rpo_ray.learner.engine import LearnerError
    from g2rpo_ray.models.loading import ModelFolderError
    from g2rpo_ray.prompts.dataset import PromptFileError
    from g2rpo_ray.rewards.client import InvalidRewardError
    from g2rpo_ray.rewards.scorer import ScorerError
    from g2rpo_ray.rollout.pool import RolloutError
    from g2rpo_ray.run import RunFolderError, write_resolved
    from g2rpo_ray.stop import StopRequested
    from g2rpo_ray.tracking.metrics import TrackingError
    from g2rpo_ray.weight_sync import WeightSyncError

    print(describe(config), flush=True)
    if options.dry_run:
        print(f"resolved configuration: {write_resolved(config)}")
        return 0

    from g2rpo_ray.driver import train

    try:
        train(config, options.resume)
    except (
        ModelFolderError, PromptFileError, RunFolderError, CheckpointError, ClusterError,
        ScorerError, TrackingError,
    ) as error:  # fmt: skip
        return _report(error, EXIT_BAD_INPUT)
    except (RolloutError, LearnerError, WeightSyncError, InvalidRewardError) as error:
        return _report(error, EXIT_FAILED)
    except StopRequested as request:
        return SIGNAL_BASE + request.signal_number
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="g2rpo", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model with a configuration")
    _add_config(train)
    train.add_argument(
        "--dry-run", action="store_true", help="print the batch arithmetic, write the resolved "
        "configuration into run_dir, start nothing",
    )  # fmt: skip
    train.add_argument(
        "--resume", default="none", metavar="auto|PATH|none",
        help="continue from the run's last checkpoint, from one folder, or start anew (default)",
    )  # fmt: skip
    train.set_defaults(run=_train)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, see configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's"
    )


def _report(error: Exception, code: int) -> int:
    print(f"g2rpo: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
