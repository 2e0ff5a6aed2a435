"""Whole iterations of recipes at true size with random weights, on one card, and their plans.

    python scripts/bench_families.py --out found sd3_5_medium_g2rpo_hps_lora z_image_g2rpo_hps_lora
    ... --together 3                   # three on the card until they are warm, then one at a time
    ... --tiny --card cpu-core --models FOLDER      # CPU; tiny models by the names in the recipes

A recipe runs in a process of its own, through the run's own roles: its files are written (text
encoders without weights; embeddings are random), an iteration warms up, another is measured, then a
learner pass and a large matrix product. Members and SDE steps are reduced (``settings.yaml``:
families); ``key=value`` overrides any setting, ``model.random_weights=true`` writes no weights. A
recipe that takes too long is ended, and the others go on; ``found/NAME.json`` is written by stages,
and what its processes held of the card over time in ``NAME_memory.csv`` and ``.svg``.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import measuring
import memory_plot
import program
import rehearse
import true_size
from bench_scale import Bench
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.plan.networks import planned_family
from g2rpo_ray.plan.plan import as_json, make_plan


class Turns:
    """Recipes that share a card: all get warm beside each other, then each has it to itself."""

    def __init__(self, folder: Path, name: str, count: int) -> None:
        self.folder, self.name, self.count = folder, name, count

    @contextmanager
    def mine(self) -> Iterator[None]:
        (self.folder / self.name).touch()
        # Whoever ended without getting warm is entered by the parent.
        while len(list(self.folder.iterdir())) < self.count:
            time.sleep(0.2)
        with (self.folder.parent / "turn.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class FamilyBench(Bench):
    batches = (1,)

    def measure(self, turns: Turns, plan: dict[str, Any]) -> None:
        """Iterations of one recipe; the second one and what it is compared with are alone."""
        self.content["plan"] = plan
        self.turns = turns
        self.run(["iteration"])

    def iterations(self) -> None:
        """As many as ``iterations`` says: the first warms up, the second is what is told."""
        self.iteration(0)
        with self.turns.mine():
            for number in range(1, self.config.iterations):
                self.iteration(number)
            self.learner_pass()
        self.content["summary"] = self.summary()
        measuring.write_json(self.path, self.content)

    def summary(self) -> dict[str, Any]:
        """The network's operations are the work: of its own seconds on the card ("evaluations"), of
        the whole generation with decoding and the last scores, and of the iteration."""
        plan, stages = self.content["plan"], self.content["stages"]
        found, learner = stages["iteration 1"], stages["learner pass, batch 1"]
        matrix, forwards = learner["matrix"], plan["policy"]["evaluation_tflop"]
        seconds, work = found["generate_s"], forwards * found["evaluations"]
        learned = self.pass_tflop * found["passes"]
        row: dict[str, Any] = {
            "evaluations": found["evaluations"], "evaluations/s": found["evaluations"] / seconds,
            "matrix TFLOP/s": matrix,
            "evaluations: share of it": work / found["denoise_s"] / matrix,
            "matrix for 4 s in a row, TFLOP/s": learner["matrix_in_a_row"],
            "evaluations: share of that": work / found["denoise_s"] / learner["matrix_in_a_row"],
            "generate: share of it": work / seconds / matrix,
            "iteration: share of it": (work + learned) / found["iteration_s"] / matrix,
            "learner pass: share of it": learner["share_of_matrix_rate"],
            "first log ratio": found["first_max_abs_log_ratio"],
        }  # fmt: skip
        for name in ("iteration_s", "generate_s", "learn_s", "sync_s"):
            row[name], row[f"planned {name}"] = found[name], plan["configured"][name]
        for role, gib in found["memory_gib"].items():
            row[f"{role}, GiB"] = gib.get("allocated_peak", gib.get("host_peak"))
            row[f"planned {role}, GiB"] = sum(plan["memory_gib"][role.rpartition(" ")[0]].values())
        return row


def measure(recipe: Path, options: argparse.Namespace) -> None:
    """Of one recipe, in this process."""
    name, out = recipe.stem, options.out.absolute()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        config = make_config(recipe, options)
        write_model(config)
        (true_size.write_tiny_scorers if options.tiny else true_size.write_scorers)(config)
        plan = as_json(make_plan(config, load_costs(), None, options.card))
        counted = plan["policy"]["evaluation"]
        plan["policy"]["evaluation_tflop"] = (counted["matrix"] + counted["attention"]) / 1e12
        card = measuring.card_name(torch.device("cpu" if options.tiny else "cuda"))
        facts = {"recipe": name, "overrides": options.overrides, "card": card}
        facts["torch"], facts["model"] = torch.__version__, plan["policy"]["source"]
        facts["files_s"] = round(time.perf_counter() - options.began_s, 1)
        print(f"files and plan: {facts['files_s']} s")
        turns = Turns(out / "turns", name, options.count)
        FamilyBench(config, out / f"{name}.json", facts).measure(turns, plan)


def write_model(config: Config) -> None:
    """Where none is yet; and the embeddings of the texts that are drawn."""
    if not (folder := resolve_path(config.model.path)).exists():
        family, _ = planned_family(config.model.path)
        weights = not config.model.random_weights
        true_size.write_model(folder, family, networks=weights, text_encoders=False)
    texts = [f"{measuring.PROMPT} {n}" for n in range(config.sampling.prompts_per_iteration)]
    for path in (config.prompts.train, config.prompts.heldout):
        true_size.write_embeddings(config, resolve_path(path), texts)


def make_config(recipe: Path, options: argparse.Namespace) -> Config:
    """The recipe's settings, fewer counts, and of its rewards those that are trained on."""
    chosen = measuring.settings("families", "families_tiny" if options.tiny else recipe.stem)
    if options.tiny:
        chosen += [s for s in rehearse.tiny_settings(load_config(recipe)) if "rewards" in s]
        chosen += measuring.settings("rehearse_tiny", "rehearse_tiny_lora")
    if options.models is not None:
        name = resolve_path(load_config(recipe).model.path).name
        chosen.append(f"model.path={options.models / name}")
    config = load_config(recipe, [*chosen, *options.overrides])
    trained = {name: r for name, r in config.rewards.items() if r.weight > 0}
    return config.model_copy(update={"rewards": trained})


def run_together(recipes: list[Path], options: argparse.Namespace, passed: list[str]) -> None:
    """Some recipes on one card, each ended at its limit."""
    turns = options.out / "turns"
    shutil.rmtree(turns, ignore_errors=True)
    turns.mkdir()
    started_s, running = time.monotonic(), {}
    # Each of worker and rank of each recipe has so many.
    threads = max(2, (os.cpu_count() or 2) // (2 * len(recipes)))
    for recipe in recipes:
        shutil.rmtree(samples := options.out / f"{recipe.stem}_samples", ignore_errors=True)
        environment = measuring.watched(samples)
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        command = [sys.executable, __file__, *passed, "--one", str(recipe)]
        with (options.out / f"{recipe.stem}.log").open("w") as log:
            running[recipe.stem] = subprocess.Popen(
                [*command, "--count", str(len(recipes))],
                env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
    while running:
        for name, process in list(running.items()):
            past_s = time.monotonic() - started_s
            # Who is warm waits for others: its own time is over when that of all is.
            limit_s = options.limit_s if (turns / name).exists() else options.warm_s
            if process.poll() is None and past_s > limit_s:
                print(f"{name}: ended at its limit of {limit_s:g} s")
                process.kill()
                process.wait()
            if process.poll() is not None:
                print(f"{name}: exit code {process.returncode} after {past_s:.0f} s")
                lines = 60 if process.returncode else 12
                print("".join((options.out / f"{name}.log").read_text().splitlines(True)[-lines:]))
                (turns / name).touch()
                del running[name]
        time.sleep(0.2)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    parser.add_argument("--together", type=int, default=1, help="recipes on the card at once (1)")
    parser.add_argument("--warm-s", type=float, default=240.0, help="until one is warm (240)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each (300)")
    parser.add_argument("--card", default="H200", help="as of g2rpo plan (H200)")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in a minute")
    parser.add_argument("--models", type=Path, help="folder with those that are not to be written")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="RECIPE or key.sub=value")
    options = parser.parse_args(arguments)
    options.models = options.models and options.models.absolute()
    options.overrides = [name for name in options.names if "=" in name]
    options.recipes = [
        measuring.ROOT / "configs" / f"{n}.yaml" for n in options.names if "=" not in n
    ]
    options.began_s = time.perf_counter()
    return options


def main() -> int:
    """Returns 1 where a recipe has no whole result."""
    options = parse()
    if options.one is not None:
        measure(options.one, options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    recipes, at_once = options.recipes, options.together
    for recipe in recipes:
        # What is not allowed is told before the first one takes its minutes.
        make_config(recipe, options)
    for first in range(0, len(recipes), at_once):
        run_together(recipes[first : first + at_once], options, sys.argv[1:])
    rows = []
    for recipe in recipes:
        file = options.out / f"{recipe.stem}.json"
        content = measuring.read_json(file, dict[str, Any]) if file.is_file() else {}
        if "summary" in content:
            rows.append({"recipe": recipe.stem} | content["summary"])
        if "plan" in content:
            place, samples = (options.out / f"{recipe.stem}_{w}" for w in ("memory", "samples"))
            held = memory_plot.keep(samples, place, content["plan"], None)
            print(f"{recipe.stem}: {json.dumps(held)}")
            measuring.write_json(file, content | {"memory": held})
    if rows:
        # A row a number: recipes are few.
        measuring.print_table(
            [{"": key} | {r["recipe"]: r[key] for r in rows} for key in rows[0]][1:]
        )
    return 0 if len(rows) == len(recipes) else 1


if __name__ == "__main__":
    program.run(main)
