"""``g2rpo doctor``: what is wrong with the cluster, each finding with its remedy."""

import argparse
from pathlib import Path

from g2rpo_ray.commands.options import read_config, write_json

HELP = "what is wrong with the cluster; exit code 0 OK, 1 WARN, 2 FAIL"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="YAML file of a run")
    parser.add_argument("--json", type=Path, help="write the findings here, too")


def run(options: argparse.Namespace) -> int:
    config = read_config(options) if options.config else None
    from g2rpo_ray.doctor.examine import examine
    from g2rpo_ray.doctor.findings import as_json, as_text, worst

    findings = examine(config)
    print(as_text(findings))
    write_json(options.json, as_json(findings))
    return worst(findings)
