"""``g2rpo demo``: a page on this machine, on which people draw with a run's weights."""

import argparse
from pathlib import Path

from g2rpo_ray.commands.options import read_run_config

HELP = "draw with a run's weights on a web page"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a page on which people write prompts, and see the run's pictures beside the base "
        "model's, with their scores. It needs g2rpo-ray[demo]. Drawing is where the run's workers "
        "draw; to choose, add rollout.gpus_per_worker=0 or =1, and so on."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run")
    parser.add_argument("--port", type=_port, default=7860, help="of the page (7860)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="to listen on; beyond this machine (127.0.0.1) only with a login, from the variables "
        "G2RPO_DEMO_USER and G2RPO_DEMO_PASSWORD",
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port from 1 to 65535")
    return int(text)


def run(options: argparse.Namespace) -> None:
    config = read_run_config(options)
    from g2rpo_ray.evaluation.demo.page import serve

    serve(config, options.host, options.port)
