"""``g2rpo embed``: prompts encoded once, for any number of runs."""

import argparse
from pathlib import Path

from g2rpo_ray.commands.options import add_config, count, read_config
from g2rpo_ray.common.formatting import format_size

HELP = "encode prompts once, for any number of runs"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "its model and prompts sections")
    parser.add_argument(
        "source", metavar="SOURCE", help="prompts in any form that prompts.train takes"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write, or to go on in")
    parser.add_argument("--dedup", action="store_true", help="leave out doubles")
    parser.add_argument(
        "--min-characters", type=int, default=0, metavar="N", help="leave out shorter ones"
    )
    parser.add_argument("--max-characters", type=int, metavar="N", help="leave out longer ones")
    parser.add_argument(
        "--language", action="append", metavar="CODE", help="keep it (en, zh, ...); repeatable"
    )
    parser.add_argument("--limit", type=count, metavar="N", help="keep N, evenly spaced")
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="encoders (1)")
    parser.add_argument("--cpus-per-worker", type=float, default=1.0, metavar="N", help="(1)")
    parser.add_argument(
        "--gpus-per-worker", type=float, default=0.0, metavar="N", help="(0: on the CPU)"
    )
    parser.add_argument("--shard-size", type=count, default=64, metavar="N", help="prompts (64)")


def run(options: argparse.Namespace) -> None:
    config = read_config(options)
    from g2rpo_ray.prompts.selection import Selection
    from g2rpo_ray.training.embed import EmbedOptions, embed

    selection = Selection(
        dedup=options.dedup,
        min_characters=options.min_characters,
        max_characters=options.max_characters,
        languages=tuple(options.language or ()),
        limit=options.limit,
    )
    workers = EmbedOptions(
        workers=options.workers,
        cpus_per_worker=options.cpus_per_worker,
        gpus_per_worker=options.gpus_per_worker,
        shard_size=options.shard_size,
    )
    manifest = embed(config, options.source, options.out, selection, workers)
    size = format_size(sum(file.bytes for file in manifest.files))
    print(f"{options.out}: {manifest.prompts} prompts, {size}; prompts.train takes the folder")
