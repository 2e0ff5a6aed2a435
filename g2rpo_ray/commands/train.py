"""``g2rpo train``: a run to its end, or to a signal."""

import argparse

from g2rpo_ray.commands.options import add_config, read_config
from g2rpo_ray.common.imports import uncollected

HELP = "train a model with a configuration"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.epilog = (
        "rollout.speed=balanced or fast completes pictures in less time, at a measured price: "
        "docs/performance.md"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the batch arithmetic, write the resolved configuration, start nothing",
    )
    parser.add_argument(
        "--resume",
        default="none",
        metavar="auto|PATH|none",
        help="continue from the run's last checkpoint, from one folder, or start anew (default)",
    )


def run(options: argparse.Namespace) -> None:
    config = read_config(options)
    with uncollected():
        from g2rpo_ray.plan.arithmetic import describe

    print(describe(config), flush=True)
    if options.dry_run:
        from g2rpo_ray.models.kernels import check_cache
        from g2rpo_ray.plan.plan import encoding_lines, prompt_lines, reward_lines
        from g2rpo_ray.run.folder import write_resolved

        check_cache(config)
        lines = [*prompt_lines(config), *reward_lines(config), *encoding_lines(config)]
        print(*lines, sep="\n")
        print(f"resolved configuration: {write_resolved(config)}")
        return

    with uncollected():
        from g2rpo_ray.training.train import train

    train(config, options.resume)
