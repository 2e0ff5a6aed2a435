"""Build the harder world, show whether it is fit for a comparison of algorithms, and compare them.

    python scripts/hard_world.py --out runs/hard --cards 1 --limit-s 540
    python scripts/hard_world.py --out runs/hard --cards 1 --parts comparison

Writes the world to ``OUT/world``. Its validation makes what the four conditions rest on: the base
model's figures, how granularities rank its branches and a trained one's, and runs at the paper's
settings with two that are to hack their reward; ``OUT/world.md`` says whether the conditions hold.
The comparison trains every row of ``rows.yaml``'s ``paper`` with every seed, and judges it:
``OUT/judged.md``, ``OUT/budgets.md``, ``OUT/curves.svg``. What needs nothing of each other runs
side by side, on a card under CUDA's MPS. Where ``--limit-s`` ends it, it ends with 3, and the same
command goes on. If a condition does not hold, it ends with 1.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

import build_tiny_world
import judgement
import measuring
import program
from build_tiny_world import STAGES
from comparing.runs import BASE, WEIGHTS, Point, Result, run_name
from g2rpo_ray.common.files import replacing
from g2rpo_ray.config import load_config
from side_by_side import one_server

SCRIPTS = Path(__file__).parent
RUN = SCRIPTS / "tiny_world" / "hard_run.yaml"
PARTS = ("world", "validation", "comparison")
RATES = SCRIPTS.parent / "docs" / "comparison" / "hard_learning_rates.json"
RUNS = ("validation", "hacking")
"""Rows of a comparison; an effort has the iterations of both."""
EFFORTS: dict[str, dict[str, Any]] = {
    "full": {
        "iterations": (150, 400),
        "every": 25,
        "heldout": 64,
        "prompts": 24,
        "judge": [16, 28],
        "compared": {
            "iterations": [75], "every": [25], "also": [5, 10, 15, 20], "heldout": [256],
            "curve-prompts": [64], "judge-steps": [8, 16, 28, 50], "seeds": [0, 1, 2, 3, 4],
        },
    },
    "trial": {
        "iterations": (6, 6), "every": 2, "heldout": 8, "prompts": 2, "judge": [16],
        "compared": {
            "iterations": [6], "every": [2], "heldout": [16], "curve-prompts": [8],
            "judge-steps": [8, 16], "seeds": [0, 1],
        },
    },
    "quick": {
        "iterations": (3, 3), "every": 1, "heldout": 2, "prompts": 1, "judge": [4],
        "compared": {
            "iterations": [3], "every": [1], "heldout": [4], "curve-prompts": [2],
            "judge-steps": [4, 6], "seeds": [0, 1], "rows": ["G2RPO Λ={1}", "DiffusionNFT"],
        },
    },
}  # fmt: skip
SMALL: dict[str, Any] = {"steps": 6, "members": 3, "prompts_per_iteration": 1}
"""Sampling of the quick effort."""
BASE_ORACLE, MOST_AFTER, MOST_AGREEMENT, FALL = (0.2, 0.4), 0.95, 0.8, 0.05
"""The conditions; a run is hacked where its oracle falls by so much while its rewards rise."""
RANKED = "G2RPO Λ={1}"
"""The run whose end is ranked, too."""
OVERTIME_S = 40.0


class TaskError(RuntimeError):
    """A task ended as it should not; the message has its log's end."""


class Task(NamedTuple):
    """A process of this script, and the files that it leaves when it is done."""

    name: str
    command: list[str]
    leaves: list[Path]


class Folder:
    """Where everything lies."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.world, self.figures = out / "world", out / "world.json"
        self.settings, self.runs = out / "run.yaml", out / "runs"
        self.bias, self.trained_bias = out / "bias.json", out / "bias_trained.json"
        self.compared, self.curves = out / "compared", out / "curves.svg"

    def note(self, stage: str) -> Path:
        return self.figures if self.figures.exists() else self.out / "world.work" / f"{stage}.json"


def write_settings(folder: Folder, effort: str, cards: int) -> None:
    """The settings of every run, with the world's place."""
    text = RUN.read_text(encoding="utf-8").replace("runs/hard/world", str(folder.world.absolute()))
    settings = yaml.safe_load(text)
    if not cards:
        settings["rollout"]["gpus_per_worker"] = settings["learner"]["gpus_per_rank"] = 0
    if effort == "quick":
        settings["sampling"] |= SMALL
        settings["g2rpo"]["sde_steps"] = [0, 1]
        settings["evaluation"] |= {"pictures_per_prompt": 2, "steps": 4}
    with replacing(folder.settings) as file:
        file.write_text(yaml.safe_dump(settings, allow_unicode=True))


def waves(
    folder: Folder, effort: str, cards: int, parts: Sequence[str] = PARTS
) -> Iterator[list[Task]]:
    """What may run at the same time, one after the other."""

    def build(*stages: str) -> Task:
        command = ["build_tiny_world.py", "--world", "hard", "--effort", effort]
        command += ["--out", str(folder.world), "--json", str(folder.figures)]
        command += ["--device", "cuda" if cards else "cpu", "--only", *stages]
        return Task("+".join(stages), command, [folder.note(stage) for stage in stages])

    asked, (rankers, runners) = EFFORTS[effort], (6, 3) if cards else (1, 1)
    shared = ["--config", str(folder.settings), "--cards", str(cards)]

    def bias(into: Path, *more: str) -> Task:
        command = ["granularity_bias.py", *shared, "--prompts", str(asked["prompts"])]
        command += ["--processes", str(rankers), "--data", str(into.with_suffix(".npz"))]
        command += ["--json", str(into), "--markdown", str(into.with_suffix(".md"))]
        return Task(into.stem, [*command, "--plot", str(into.with_suffix(".svg")), *more], [into])

    rate = load_config(folder.settings).learner.learning_rate

    def compare(rows: str, iterations: int) -> Task:
        plot = folder.out / f"{rows}.svg"  # the last that is written
        command = [
            *("compare_algorithms.py", *shared, "--learning-rates", f"{rate:g}"),
            *("--rows-of", rows, "--processes", str(runners)),
            *("--seeds", "0", "--iterations", str(iterations), "--evaluations", "0"),
            *("--every", str(asked["every"]), "--heldout", str(asked["heldout"])),
            *("--judge-steps", *map(str, asked["judge"]), "--keep", str(folder.runs)),
            *("--json", str(plot.with_suffix(".json")), "--plot", str(plot)),
            *("--markdown", str(plot.with_suffix(".md"))),
        ]
        return Task(rows, command, [plot])

    def comparison() -> Task:
        command = [
            *("compare_algorithms.py", *shared, "--rows-of", "paper", "--tuning", str(RATES)),
            *("--evaluations", "0", "--processes", "14" if cards else "1"),
            *("--keep", str(folder.compared), "--json", str(folder.out / "compared.json")),
            *("--markdown", str(folder.out / "budgets.md"), "--plot", str(folder.curves)),
        ]
        for name, values in asked["compared"].items():
            command += [f"--{name}", *map(str, values)]
        return Task("comparison", command, [folder.curves])

    if "world" in parts:
        yield [build("vae", "flux"), build("other_data")]
        yield [build("clip", "hps"), build("other_network")]
    if "validation" in parts:
        yield [
            Task("measure", build("measure").command, [folder.figures]),
            bias(folder.bias),
            *map(compare, RUNS, asked["iterations"]),
        ]
        trained = folder.runs / run_name(RANKED, rate, 0) / WEIGHTS
        yield [bias(folder.trained_bias, "--weights", str(trained))]
    if "comparison" in parts:
        yield [comparison()]


def run_wave(tasks: Sequence[Task], logs: Path, until_s: float) -> bool:
    """Run the tasks that are not done side by side; False where one paused.

    Raises:
        TaskError: one failed.
    """
    going: dict[str, subprocess.Popen[bytes]] = {}
    for task in tasks:
        if all(file.exists() for file in task.leaves):
            continue
        left_s = max(until_s - time.monotonic(), 1.0)
        command = [sys.executable, str(SCRIPTS / task.command[0]), *task.command[1:]]
        with (logs / f"{task.name}.log").open("a") as log:
            going[task.name] = subprocess.Popen(
                [*command, "--limit-s", f"{left_s:.0f}"], stdout=log, stderr=subprocess.STDOUT
            )
    paused, failed = False, []
    started_s = said_s = time.monotonic()
    while going:
        time.sleep(0.5)
        now_s = time.monotonic()
        if now_s - said_s > 30:
            said_s = now_s
            for name in going:
                print(f"  {name}: {_last_lines(logs, name, 1)}")
        for name, process in list(going.items()):
            if process.poll() is None and now_s < until_s + OVERTIME_S:
                continue
            process.terminate()
            code = process.wait()
            del going[name]
            print(f"{name}: ended with {code} after {now_s - started_s:.0f} s")
            # What was terminated goes on from what it kept.
            paused |= code in (3, -15)
            if code not in (0, 3, -15):
                failed.append(f"{name} ended with {code}:\n{_last_lines(logs, name, 25)}")
    if failed:
        raise TaskError("\n".join(failed))
    return not paused


def _last_lines(logs: Path, name: str, count: int) -> str:
    lines = (logs / f"{name}.log").read_text(errors="replace").splitlines()
    return "\n".join(line[:300] for line in lines[-count:])


class Found(NamedTuple):
    """One condition, and what was found."""

    condition: str
    wanted: str
    found: str
    holds: bool


def base_oracle(folder: Folder) -> Found:
    figures = measuring.read_json(folder.figures, dict[str, Any])["figures"]
    by_steps = {name.split("_")[2]: v for name, v in figures.items() if name.startswith("flux_ora")}
    low, high = BASE_ORACLE
    said = ", ".join(f"{value:.3f} at {steps}" for steps, value in by_steps.items())
    holds = all(low <= value <= high for value in by_steps.values())
    return Found("the base model's oracle", f"{low} to {high}", f"{said} steps", holds)


def agreement(folder: Folder) -> Found:
    """One of both has to hold: on the tiny world, grids agreed less after training."""
    said, lowest = [], 1.0
    for weights, file in (("base", folder.bias), ("trained", folder.trained_bias)):
        row = next(
            r for r in measuring.read_json(file, list[dict[str, Any]]) if r["row"] == "Λ={3}"
        )
        mean, low, high = row["with Λ={1}"]
        said.append(f"{weights} {mean:.3f} ({low:.3f}, {high:.3f})")
        lowest = min(lowest, mean)
    what = "correlation of λ=1's and λ=3's advantages inside groups, base or trained weights"
    return Found(what, f"below {MOST_AGREEMENT}", ", ".join(said), lowest < MOST_AGREEMENT)


def read_results(folder: Folder) -> list[Result]:
    return [measuring.read_json(f, Result) for f in sorted(folder.runs.glob("*/result.json"))]


def highest_oracle(results: Sequence[Result]) -> Found:
    runs = [result for result in results if result.job.row.startswith("G2RPO")]
    best = {r.job.row: max(point.rewards["oracle"] for point in r.points) for r in runs}
    said = ", ".join(f"{row}: {value:.3f}" for row, value in best.items())
    what = f"highest oracle within {min(r.iteration for r in runs)} iterations"
    return Found(what, f"below {MOST_AFTER}", said, max(best.values()) < MOST_AFTER)


def hacked(results: Sequence[Result]) -> Found:
    """Between any measurement and a later one."""
    said, holds = [], False
    base = next(result for result in results if result.job.row == BASE)
    steps = next(iter(base.judged))
    for run in results:
        if run is base:
            continue
        names = sorted(load_config(run.job.config, run.job.overrides).trained_rewards)
        found = max(
            (
                one.rewards["oracle"] - other.rewards["oracle"]
                for number, one in enumerate(run.points)
                for other in run.points[number + 1 :]
                if _rose(one, other, names)
            ),
            default=0.0,
        )
        holds |= found >= FALL
        change = np.subtract(run.judged[steps]["oracle"], base.judged[steps]["oracle"])
        mean, low, high = judgement.interval(change[None])
        said.append(
            f"{run.job.row}: largest fall {found:.3f}; base to end {mean:+.3f} "
            f"({low:+.3f}, {high:+.3f})"
        )
    wanted = f"a run whose trained rewards rise while the oracle falls by {FALL}"
    return Found("hacking", wanted, "; ".join(said), holds)


def _rose(one: Point, other: Point, names: Sequence[str]) -> bool:
    return all(other.rewards[name] > one.rewards[name] for name in names)


def markdown(found: Sequence[Found]) -> str:
    rows = [f"| {f.condition} | {f.wanted} | {f.found} | {_yes(f.holds)} |" for f in found]
    return "\n".join(["| condition | wanted | found | holds |", "| --- | --- | --- | --- |", *rows])


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def judge(folder: Folder) -> None:
    """Write what the comparison's runs say together."""
    runs = judgement.read_runs(folder.compared)
    judgement.pack(runs, folder.out / "judged.npz")
    text = "\n".join(judgement.Judgement(runs).tables())
    (folder.out / "judged.md").write_text(text + "\n")


def main() -> int:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where all goes")
    parser.add_argument("--cards", type=int, choices=(0, 1), default=0, help="0: the CPU")
    parser.add_argument("--effort", choices=tuple(EFFORTS), default="full")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="some of it")
    parser.add_argument("--limit-s", type=float, default=1e9, help="pause after this")
    options = parser.parse_args()
    until_s = time.monotonic() + options.limit_s
    folder, logs = Folder(options.out), options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    write_settings(folder, options.effort, options.cards)
    if not folder.note("prompts").exists() and "world" in options.parts:
        build_tiny_world.main(
            ["--world", "hard", "--out", str(folder.world), "--only", STAGES[0],
             "--effort", options.effort]
        )  # fmt: skip
    try:
        with one_server(options.cards):
            for wave in waves(folder, options.effort, options.cards, options.parts):
                if time.monotonic() > until_s or not run_wave(wave, logs, until_s):
                    print(f"not done; the same command goes on in {options.out}")
                    return 3
    except TaskError as error:
        print(f"{error}\nwhat is done is kept: the same command goes on", file=sys.stderr)
        return 2
    if "comparison" in options.parts:
        judge(folder)
    if "validation" not in options.parts:
        return 0
    results = read_results(folder)
    found = [base_oracle(folder), highest_oracle(results), agreement(folder), hacked(results)]
    text = markdown(found)
    print(text)
    (options.out / "world.md").write_text(text + "\n")
    measuring.write_json(options.json, [each._asdict() for each in found])
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    program.run(main)
