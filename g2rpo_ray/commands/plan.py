"""``g2rpo plan``: memory, time and the split of GPUs, before they are spent."""

import argparse
from pathlib import Path

from g2rpo_ray.commands.options import add_config, read_config, write_json

HELP = "predict memory and time, and the split of GPUs"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--gpus", type=int, help="GPUs to share out (as many as CONFIG asks for)")
    parser.add_argument("--card", help="kind of GPU, a name in the table of costs (H100)")
    parser.add_argument("--costs", type=Path, help="table of costs instead of the package's own")
    parser.add_argument("--json", type=Path, help="write the plan here, too")


def run(options: argparse.Namespace) -> None:
    config = read_config(options)
    from g2rpo_ray.plan.costs import load_costs
    from g2rpo_ray.plan.plan import as_json, as_text, make_plan

    plan = make_plan(config, load_costs(options.costs), options.gpus, options.card)
    print(as_text(plan))
    write_json(options.json, as_json(plan))
