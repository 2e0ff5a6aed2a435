"""A recipe's iterations on a card of a chosen size: memory over time by role, beside the plan's.

    python scripts/bench_card.py configs/flux_g2rpo_hps_40gb_lora.yaml --limit-gib 38 --out found
    ... --tiny                                            # the tiny world, host memory, on the CPU

Files of true size with random weights, then ``g2rpo train`` on them, with few prompts and SDE steps
(``settings.yaml``: card) and the trained rewards alone; ``key=value`` overrides any setting. A
process holds the rest of the card, so that all of the run's together have no more than the limit,
contexts included; shares of the card become those of one of that size (``--limit-gib 0``: all of
it, and shares as they are). In ``found``: memory.csv, memory.svg, result.json and the run's log,
metrics.jsonl, log.jsonl and summary.json. ``--work FOLDER`` keeps the files for the next call;
``--kill-holder N`` kills who holds the frozen weights when N iterations are recorded.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import yaml

import measuring
import memory_plot
import program
import rehearse
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.config.files import read_settings
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.plan.plan import as_json, make_plan
from g2rpo_ray.tracking.metrics import read_metrics

SCRIPTS = measuring.ROOT / "scripts"
BALLAST = """
import sys, torch
torch.empty(1, device="cuda")
free, total = torch.cuda.mem_get_info()
kept = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], total, flush=True)
sys.stdin.read()
"""
"""Holds what is free beyond a limit, until its input ends; says what it left, and the card's."""
SHARES = ("rollout.gpus_per_worker", "learner.gpus_per_rank", "prompts.encoder_gpus")


@contextmanager
def ballast(limit_gib: float) -> Iterator[tuple[float, float]]:
    """While inside, other processes have that much of the card; yields what is left, and all."""
    command = [sys.executable, "-c", BALLAST, str(int(limit_gib * measuring.GIB))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left, total = (int(word) / measuring.GIB for word in process.stdout.readline().split())
        print(f"{left:.2f} of {total:.1f} GiB are left to the run")
        yield left, total
        # Ends its input, and so itself.
        process.communicate()


def shares_of(config: Config, factor: float) -> list[str]:
    """The roles' shares of a card as those of ``factor`` of it."""
    shares = {key: attrgetter(key)(config) for key in SHARES}
    for name, reward in config.rewards.items():
        shares[f"rewards.{name}.gpus_per_replica"] = reward.gpus_per_replica
    # Ray counts to the fourth digit.
    return [f"{key}={int(v * factor * 1e4) / 1e4}" for key, v in shares.items() if 0 < v <= 1]


def write_recipe(options: argparse.Namespace, scratch: Path) -> Path:
    """The recipe without the rewards that only judge."""
    trained = load_config(options.recipe).trained_rewards
    tree = read_settings(options.recipe, [])
    tree["rewards"] = {n: reward for n, reward in tree["rewards"].items() if n in trained}
    recipe = scratch / options.recipe.name
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return recipe


def train(recipe: Path, overrides: Sequence[str], options: argparse.Namespace) -> int | None:
    """Run it in the recipe's folder, watched; its exit code, or none at the time limit."""
    environment = measuring.watched(recipe.parent / f"{options.out.name}_samples")
    # The parent's cluster, if any, is not the run's.
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, *rehearse.CLI, "train", recipe.name, *overrides],
        cwd=recipe.parent, env=environment, start_new_session=True,
        stdout=(options.out / "run.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    if options.kill_holder is not None:
        arguments = process.pid, recipe.parent / options.out.name, options.kill_holder
        threading.Thread(target=kill_holder, args=arguments, daemon=True).start()
    try:
        return process.wait(options.limit_s - (time.monotonic() - options.began_s))
    except subprocess.TimeoutExpired:
        print("the run is ended at the time limit")
        for sent in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            process.send_signal(sent)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
                break
        return None


def kill_holder(driver: int, run: Path, iterations: int) -> None:
    """When so many are recorded; a run that ends before is left alone."""
    started_s = time.monotonic()
    while psutil.pid_exists(driver):
        trained = [r for r in read_metrics(run) if r["kind"] == "train"] if run.is_dir() else []
        if len(trained) >= iterations:
            break
        time.sleep(0.2)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            title = (process.cmdline() or [""])[0]
            ours = any(parent.pid == driver for parent in process.parents())
            if ours and title.startswith("ray::FrozenHolder"):
                process.kill()
                print(f"holder {process.pid} killed after {time.monotonic() - started_s:.1f} s")


def report(
    options: argparse.Namespace, config: Config, run: Path, left_gib: float | None
) -> dict[str, Any]:
    """What there is of results, also where the run failed; written beside the plot."""
    plan = make_plan(config, load_costs(), None, None if options.tiny else options.card)
    found = memory_plot.keep(
        run.parent / f"{run.name}_samples", options.out / "memory", as_json(plan), left_gib
    )
    records = read_metrics(run) if run.is_dir() else []
    keys = [f"time/{name}_s" for name in ("generate", "learn", "sync", "iteration")]
    keys += ["policy/first_max_abs_log_ratio", "rollout/evaluations"]
    found["iterations"] = [{k: r.get(k) for k in keys} for r in records if r["kind"] == "train"]
    for name in ("metrics.jsonl", "log.jsonl", "summary.json"):
        if (run / name).is_file():
            shutil.copyfile(run / name, options.out / name)
    if (run / "summary.json").is_file():
        summary = json.loads((run / "summary.json").read_text())
        found["weights_checksum"] = summary["weights_checksum"]
    return found


def parse() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--limit-gib", type=float, default=38.0, help="of all processes (38)")
    parser.add_argument("--work", type=Path, help="folder of the recipe's files, kept")
    parser.add_argument("--kill-holder", type=int, metavar="N", help="after N iterations")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=400.0, help="of everything (400)")
    parser.add_argument("--card", default="H200", help="whose seconds the plan has (H200)")
    parser.add_argument("--tiny", action="store_true", help="the tiny world, on the CPU")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_intermixed_args()
    options.recipe, options.out = options.recipe.absolute(), options.out.absolute()
    options.work = options.work and options.work.absolute()
    options.began_s = time.monotonic()
    return options


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    recipe = write_recipe(options, scratch)
    name = options.out.name
    overrides = [f"iterations={options.iterations}", f"run_dir={name}"]
    overrides += measuring.settings("card")
    if options.tiny:
        overrides += rehearse.tiny_settings(load_config(recipe))
    overrides += options.overrides
    config = load_config(recipe, overrides)
    if not resolve_path(config.model.path).exists():
        print("writing files")
        how = "--tiny" if options.tiny else "--embedded"
        build = [sys.executable, str(SCRIPTS / "true_size.py"), how, recipe.name, *overrides]
        # In a process of its own: its context would count.
        subprocess.run(build, cwd=scratch, check=True)
    found: dict[str, Any] = {"recipe": recipe.stem, "overrides": options.overrides}
    found["files_s"] = round(time.monotonic() - options.began_s, 1)
    if options.tiny or not options.limit_gib:
        found["exit_code"] = train(recipe, overrides, options)
        return found | report(options, config, scratch / name, None)
    with ballast(options.limit_gib) as (left_gib, total_gib):
        shares = shares_of(config, left_gib / total_gib)
        found["exit_code"] = train(recipe, [*overrides, *shares], options)
    return found | report(options, config, scratch / name, left_gib)


def main() -> int:
    """Returns 1 where the run did not end well."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        # Where the recipe's files are.
        os.chdir(work)
        found = measure(options, work)
    measuring.write_json(options.out / "result.json", found)
    print(json.dumps(found, indent=1))
    if found["exit_code"] != 0:
        print("".join((options.out / "run.log").read_text().splitlines(True)[-40:]))
    return 0 if found["exit_code"] == 0 else 1


if __name__ == "__main__":
    program.run(main)
