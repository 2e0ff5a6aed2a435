"""``g2rpo evaluate``: weights side by side on held-out prompts."""

import argparse
from pathlib import Path

from g2rpo_ray.commands.options import numbers, read_run_config

HELP = "compare weights on held-out prompts"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare weights on held-out prompts, by default with the run's own "
        "rollout.gpus_per_worker, prompts.encoder_gpus and rewards.NAME.gpus_per_replica; 0 is the "
        "CPU. To choose, add rollout.gpus_per_worker=0 and so on."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run with the settings")
    parser.add_argument(
        "--checkpoint",
        action="append",
        metavar="[LABEL=]last|best|base|PATH",
        help="weights; may be given repeatedly (base and last); PATH is a checkpoint or a run",
    )
    parser.add_argument(
        "--steps",
        type=numbers(int),
        metavar="N,N,...",
        help="steps of a trajectory, each a row (evaluation.steps)",
    )
    parser.add_argument(
        "--hybrid",
        type=numbers(float),
        metavar="SHARE,...",
        help="also: this share of the steps by the trained weights, the rest by the base model",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the results (RUN_DIR/evaluation); goes on in it"
    )


def run(options: argparse.Namespace) -> None:
    config = read_run_config(options)
    from g2rpo_ray.evaluation.evaluate import evaluate

    evaluate(
        config,
        checkpoints=options.checkpoint or ["base", "last"],
        steps=options.steps or [config.evaluation.steps],
        hybrids=options.hybrid or [],
        folder=options.out or options.run_dir / "evaluation",
    )
