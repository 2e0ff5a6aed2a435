"""``g2rpo sample``: pictures with the weights of a run, in this process, without Ray."""

import argparse
from pathlib import Path

from g2rpo_ray.commands.options import add_run, count, read_run_config

HELP = "draw pictures with the weights of a run"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw pictures in this process: on a GPU, or on the CPU if the run's "
        "rollout.gpus_per_worker is 0. To choose, add rollout.gpus_per_worker=0 or =1."
    )
    add_run(
        parser,
        "last|best|base|PATH",
        "its best, the base model, one checkpoint, a run (its last), or exported or published "
        "weights or adapters",
    )
    parser.add_argument("--prompt", action="append", required=True, help="may be given repeatedly")
    parser.add_argument("--count", type=count, default=1, help="pictures of each prompt (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial noise (0)")
    parser.add_argument("--out", type=Path, default=Path("samples"), help="folder for PNG files")
    parser.add_argument(
        "--trained-steps",
        type=int,
        metavar="N",
        help="hybrid: the trained weights for N steps, the base model's for the rest (all)",
    )


def run(options: argparse.Namespace) -> None:
    config = read_run_config(options)
    from g2rpo_ray.evaluation.sample import SampleOptions, sample

    asked = SampleOptions(
        prompts=options.prompt,
        pictures_per_prompt=options.count,
        seed=options.seed,
        checkpoint=options.checkpoint,
        trained_steps=options.trained_steps,
        average=options.average,
    )
    for path in sample(config, asked, options.out):
        print(path, flush=True)
