"""``g2rpo score``: pictures that are there, judged by any scorers."""

import argparse
from pathlib import Path

HELP = "score pictures with any rewards, and compare the rewards"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Score the pictures of a folder, of a webdataset's tar files or of parquet files with any "
        "rewards, and report how far these agree: what to do before training on one. The same "
        "command goes on where it was stopped."
    )
    parser.add_argument(
        "pictures", metavar="PICTURES", type=Path, help="folder, or a .tar or .parquet file"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="of a folder: prompts in any form that prompts.train takes (a .txt beside each)",
    )
    parser.add_argument(
        "--config", metavar="CONFIG", type=Path, help="configuration or run with the rewards"
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="NAME,...",
        help="rewards of CONFIG, or kinds of scorers, whose options rewards.NAME.options.KEY=VALUE "
        "sets (all of CONFIG)",
    )
    parser.add_argument("--out", type=Path, default=Path("scores"), help="folder (scores)")
    parser.add_argument(
        "--threshold",
        action="append",
        default=[],
        type=_threshold,
        metavar="NAME=VALUE",
        help="report what passes; may be given repeatedly (the best tenth of each reward)",
    )
    parser.add_argument(
        "--ray", action="store_true", help="on Ray Serve, as in a run (in this process)"
    )


def run(options: argparse.Namespace) -> None:
    from g2rpo_ray.config.scoring import load_scoring
    from g2rpo_ray.evaluation.scoring.score import score

    names = [name for names in options.reward for name in names.split(",")]
    config = load_scoring(options.config, names, options.overrides)
    out = options.out
    report = score(config, options.pictures, options.prompts, out, options.threshold, options.ray)
    print(f"\n{report}\n{out / 'scores.parquet'}")


def _threshold(text: str) -> tuple[str, float]:
    name, separator, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not (name and separator) or number != number:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=NUMBER")
    return name, number
