"""``g2rpo download``: the models that a configuration names, into the folders that it names."""

import argparse

from g2rpo_ray.commands.options import add_config, read_config

HELP = "fetch the models that a configuration names"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--also", action="append", metavar="PATH", help="such as models/G2RPO; repeatable"
    )
    parser.add_argument("--dry-run", action="store_true", help="list files and sizes only")


def run(options: argparse.Namespace) -> None:
    config = read_config(options)
    from g2rpo_ray.models.catalogue import DownloadError, targets_of
    from g2rpo_ray.models.download import download
    from g2rpo_ray.run.paths import check_outside_states

    for target in targets_of(config, options.also or []):
        if target.source is not None:
            check_outside_states(target.folder, DownloadError, target.setting)
    download(config, options.also or [], options.dry_run)
