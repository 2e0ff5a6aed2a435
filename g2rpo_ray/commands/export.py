"""``g2rpo export``: a run's weights for diffusers and other programs."""

import argparse
from pathlib import Path

from g2rpo_ray.commands.options import add_run, read_run_config, size

HELP = "write a run's weights for diffusers, ComfyUI and others"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a run's weights for other programs, always on the CPU."
    add_run(parser, "last|best|PATH", "its best, one checkpoint's folder, or a run's (its last)")
    parser.add_argument("--to", type=Path, required=True, help="new folder to write")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument(
        "--merged", action="store_true", help="of a LoRA run: the transformer with it merged in"
    )
    layout.add_argument(
        "--format",
        choices=("diffusers", "comfyui", "kohya", "peft"),
        default="diffusers",
        help="whose names an adapter has (diffusers; kohya is his sd-scripts; vLLM-Omni: peft)",
    )
    parser.add_argument(
        "--rounding",
        choices=("nearest", "stochastic", "none"),
        default="nearest",
        help="to model.dtype: nearest (default), stochastic (keeps small updates on average and "
        "adds noise, from the run's seed); none: float32, twice the size",
    )
    parser.add_argument(
        "--max-shard-size", type=size, default="10GB", help="of a transformer's file (10GB)"
    )


def run(options: argparse.Namespace) -> None:
    config = read_run_config(options)
    from g2rpo_ray.run.export import export

    exported = export(
        config,
        options.to,
        options.checkpoint,
        layout="merged" if options.merged else options.format,
        average=options.average,
        rounding=options.rounding,
        max_shard_size=options.max_shard_size,
    )
    print(f"{exported.form}, made on the CPU, equal to the bit when read back: {options.to}")
    print(f"In {exported.dtype}, compared with the trained weights: {exported.arrived}")
    if exported.rounded_base:
        print(exported.rounded_base)
