"""``g2rpo``: the command line. Heavy libraries are imported by the command that needs them."""

import argparse
import errno
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from g2rpo_ray import __version__
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.run.stop import StopRequested

T = TypeVar("T")
EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells say it: 128 and the signal's number."""
EXIT_REQUEUE = 85
"""SIGTERM or SIGUSR1 (preemption, a time limit): a checkpoint is written, start it again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0 done, 1 failed, 2 bad input, 130 or 85 after a signal."""
    options = _parse(arguments)
    try:
        return options.run(options) or EXIT_DONE
    except InputError as error:
        return _report(error, EXIT_BAD_INPUT)
    except RunError as error:
        return _report(error, EXIT_FAILED)
    except OSError as error:
        # Any file of a command may be the one that meets a full or read-only disk.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        return _report(error, EXIT_FAILED)
    except StopRequested as request:
        return EXIT_INTERRUPTED if request.signal_number == signal.SIGINT else EXIT_REQUEUE
    except KeyboardInterrupt:
        print("g2rpo: stopped at once", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _train(options: argparse.Namespace) -> None:
    from g2rpo_ray.plan.arithmetic import describe
    from g2rpo_ray.run.folder import write_resolved

    config = load_config(options.config, options.overrides)
    print(describe(config), flush=True)
    if options.dry_run:
        print(f"resolved configuration: {write_resolved(config)}")
        return

    from g2rpo_ray.training.train import train

    train(config, options.resume)


def _sample(options: argparse.Namespace) -> None:
    from g2rpo_ray.commands.sample import sample

    config = _run_config(options)
    for path in sample(
        config,
        checkpoint=options.checkpoint,
        prompts=options.prompt,
        pictures_per_prompt=options.count,
        seed=options.seed,
        folder=options.out,
        trained_steps=options.trained_steps,
        average=options.average,
    ):
        print(path)


def _export(options: argparse.Namespace) -> None:
    from g2rpo_ray.commands.export import export

    form = export(
        _run_config(options),
        checkpoint=options.checkpoint,
        folder=options.to,
        merge=options.merged,
        average=options.average,
        max_shard_size=options.max_shard_size,
    )
    print(f"{form}, made on the CPU, read back and compared: {options.to}")


def _evaluate(options: argparse.Namespace) -> None:
    from g2rpo_ray.commands.evaluate import evaluate

    config = _run_config(options)
    evaluate(
        config,
        checkpoints=options.checkpoint or ["base", "last"],
        steps=options.steps or [config.evaluation.steps],
        hybrids=options.hybrid or [],
        folder=options.out or options.run_dir / "evaluation",
    )


def _download(options: argparse.Namespace) -> None:
    from g2rpo_ray.commands.download import download

    config = load_config(options.config, options.overrides)
    download(config, options.also or [], options.dry_run)


def _embed(options: argparse.Namespace) -> None:
    from g2rpo_ray.commands.embed import EmbedOptions, embed
    from g2rpo_ray.common.formatting import format_size
    from g2rpo_ray.prompts.selection import Selection

    manifest = embed(
        load_config(options.config, options.overrides),
        options.source,
        options.out,
        Selection(
            dedup=options.dedup,
            min_characters=options.min_characters,
            max_characters=options.max_characters,
            languages=tuple(options.language or ()),
            limit=options.limit,
        ),
        EmbedOptions(
            workers=options.workers,
            cpus_per_worker=options.cpus_per_worker,
            gpus_per_worker=options.gpus_per_worker,
            shard_size=options.shard_size,
        ),
    )
    size = format_size(sum(file.bytes for file in manifest.files))
    print(f"{options.out}: {manifest.prompts} prompts, {size}; prompts.train takes the folder")


def _plan(options: argparse.Namespace) -> None:
    from g2rpo_ray.plan.costs import load_costs
    from g2rpo_ray.plan.plan import as_json, as_text, make_plan

    config = load_config(options.config, options.overrides)
    plan = make_plan(config, load_costs(options.costs), options.gpus, options.card)
    print(as_text(plan))
    _write_json(options.json, as_json(plan))


def _doctor(options: argparse.Namespace) -> int:
    from g2rpo_ray.doctor.examine import examine
    from g2rpo_ray.doctor.findings import as_json, as_text, worst

    config = load_config(options.config, options.overrides) if options.config else None
    findings = examine(config)
    print(as_text(findings))
    _write_json(options.json, as_json(findings))
    return worst(findings)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    # argparse takes overrides in one place only; people write them before and after options.
    options, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="g2rpo", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model with a configuration")
    train.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, see configs/")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print the batch arithmetic, write the resolved configuration, start nothing",
    )
    train.add_argument(
        "--resume",
        default="none",
        metavar="auto|PATH|none",
        help="continue from the run's last checkpoint, from one folder, or start anew (default)",
    )
    train.set_defaults(run=_train)

    sample = commands.add_parser(
        "sample",
        help="draw pictures with the weights of a run",
        description="Draw pictures in this process: on a GPU, or on the CPU if the run's "
        "rollout.gpus_per_worker is 0. To choose, add rollout.gpus_per_worker=0 or =1.",
    )
    _add_run(
        sample,
        "last|best|base|PATH",
        "its best, the base model, one checkpoint, or exported or published weights",
    )
    sample.add_argument("--prompt", action="append", required=True, help="may be given repeatedly")
    sample.add_argument("--count", type=_count, default=1, help="pictures of each prompt (1)")
    sample.add_argument("--seed", type=int, default=0, help="seed of the initial noise (0)")
    sample.add_argument("--out", type=Path, default=Path("samples"), help="folder for PNG files")
    sample.add_argument(
        "--trained-steps",
        type=int,
        metavar="N",
        help="hybrid: the trained weights for N steps, the base model's for the rest (all)",
    )
    sample.set_defaults(run=_sample)

    export = commands.add_parser(
        "export",
        help="write a run's weights in diffusers' formats",
        description="Write a run's weights in diffusers' formats, always on the CPU.",
    )
    _add_run(export, "last|best|PATH", "its best, or one checkpoint's folder")
    export.add_argument("--to", type=Path, required=True, help="new folder to write")
    export.add_argument(
        "--merged", action="store_true", help="of a LoRA run: the transformer with it merged in"
    )
    export.add_argument(
        "--max-shard-size", type=_size, default="10GB", help="of a transformer's file (10GB)"
    )
    export.set_defaults(run=_export)
    for command in (sample, export):
        command.add_argument(
            "--average",
            action="store_true",
            help="of a checkpoint: the weights' moving average (learner.ema_decay)",
        )

    evaluate = commands.add_parser(
        "evaluate",
        help="compare weights on held-out prompts",
        description="Compare weights on held-out prompts, by default with the run's own "
        "rollout.gpus_per_worker, prompts.encoder_gpus and rewards.NAME.gpus_per_replica; 0 is the "
        "CPU. To choose, add rollout.gpus_per_worker=0 and so on.",
    )
    evaluate.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run with the settings")
    evaluate.add_argument(
        "--checkpoint",
        action="append",
        metavar="[LABEL=]last|best|base|PATH",
        help="weights; may be given repeatedly (base and last); PATH is a checkpoint or a run",
    )
    evaluate.add_argument(
        "--steps",
        type=_numbers(int),
        metavar="N,N,...",
        help="steps of a trajectory, each a row (evaluation.steps)",
    )
    evaluate.add_argument(
        "--hybrid",
        type=_numbers(float),
        metavar="SHARE,...",
        help="also: this share of the steps by the trained weights, the rest by the base model",
    )
    evaluate.add_argument(
        "--out", type=Path, help="folder for the results (RUN_DIR/evaluation); goes on in it"
    )
    evaluate.set_defaults(run=_evaluate)

    download = commands.add_parser("download", help="fetch the models that a configuration names")
    download.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, see configs/")
    download.add_argument(
        "--also", action="append", metavar="PATH", help="such as models/G2RPO; repeatable"
    )
    download.add_argument("--dry-run", action="store_true", help="list files and sizes only")
    download.set_defaults(run=_download)

    embed = commands.add_parser("embed", help="encode prompts once, for any number of runs")
    embed.add_argument("config", metavar="CONFIG", type=Path, help="its model and prompts sections")
    embed.add_argument(
        "source", metavar="SOURCE", help="text, .jsonl, .parquet, or a dataset's folder"
    )
    embed.add_argument("--out", type=Path, required=True, help="folder to write, or to go on in")
    embed.add_argument("--dedup", action="store_true", help="leave out doubles")
    embed.add_argument(
        "--min-characters", type=int, default=0, metavar="N", help="leave out shorter ones"
    )
    embed.add_argument("--max-characters", type=int, metavar="N", help="leave out longer ones")
    embed.add_argument(
        "--language", action="append", metavar="CODE", help="keep it (en, zh, ...); repeatable"
    )
    embed.add_argument("--limit", type=_count, metavar="N", help="keep N, evenly spaced")
    embed.add_argument("--workers", type=_count, default=1, metavar="N", help="encoders (1)")
    embed.add_argument("--cpus-per-worker", type=float, default=1.0, metavar="N", help="(1)")
    embed.add_argument(
        "--gpus-per-worker", type=float, default=0.0, metavar="N", help="(0: on the CPU)"
    )
    embed.add_argument("--shard-size", type=_count, default=64, metavar="N", help="prompts (64)")
    embed.set_defaults(run=_embed)

    plan = commands.add_parser("plan", help="predict memory and time, and the split of GPUs")
    plan.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, see configs/")
    plan.add_argument("--gpus", type=int, help="GPUs to share out (as many as CONFIG asks for)")
    plan.add_argument("--card", help="kind of GPU, a name in the table of costs (H100)")
    plan.add_argument("--costs", type=Path, help="table of costs instead of the package's own")
    plan.add_argument("--json", type=Path, help="write the plan here, too")
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser(
        "doctor",
        help="what is wrong with the cluster; exit code 0 OK, 1 WARN, 2 FAIL",
    )
    doctor.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="YAML file of a run")
    doctor.add_argument("--json", type=Path, help="write the findings here, too")
    doctor.set_defaults(run=_doctor)

    for command in (train, sample, export, evaluate, download, embed, plan, doctor):
        command.add_argument(
            "overrides",
            nargs="*",
            default=[],  # without it, argparse's messages call them required
            metavar="key.sub=value",
            help="settings that replace the file's",
        )
    return parser


def _run_config(options: argparse.Namespace) -> Config:
    """Of a run's folder, or of a configuration file where there is no run yet."""
    path: Path = options.run_dir
    if path.is_file():
        return load_config(path, options.overrides)
    config = load_config(path / "config.yaml", options.overrides)
    # Not the folder that it was trained in: it may have been copied or renamed since.
    return config.model_copy(update={"run_dir": str(path.absolute())})


def _write_json(path: Path | None, content: object) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1))
    except OSError as error:
        raise InputError(f"--json {path}: cannot be written: {error}") from error


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*(KB|MB|GB|TB)", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected such as 500MB or 10GB")
    return text


def _numbers(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def numbers(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    numbers.__name__ = f"comma-separated {kind.__name__}"
    return numbers


def _add_run(parser: argparse.ArgumentParser, names: str, others: str) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run")
    parser.add_argument(
        "--checkpoint",
        default="last",
        metavar=names,
        help=f"weights: the run's last checkpoint (default), {others}",
    )


def _report(error: Exception, code: int) -> int:
    # An error from a Ray task carries the remote traceback in its text; the cause is what helps.
    print(f"g2rpo: {getattr(error, 'cause', error)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
