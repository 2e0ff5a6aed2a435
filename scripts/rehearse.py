"""The README's path, walked by its own commands from files of true size with random weights.

    python scripts/rehearse.py --work /tmp/rehearsal --json rehearsal.json       # on one card
    python scripts/rehearse.py --work /tmp/rehearsal --json rehearsal.json --tiny          # CPU

Stages follow each other, each a command under its own limit: its seconds, its exit code, what it
left on the disk, processes that outlived it. Plans, exports and pictures go beside what follows.
The file is written after every stage. The same call again goes on with the stages that have no good
result yet (or does those of ``--stages``), so that a rehearsal can be cut into several. A recipe is
walked with few prompts and members (``settings.yaml``: rehearse).
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any

import psutil

import measuring
import program
from g2rpo_ray.cli import EXIT_REQUEUE
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.tracking.metrics import read_metrics

RECIPE = measuring.ROOT / "configs" / "flux_g2rpo_hps_one_gpu_lora.yaml"
MARK = "G2RPO_REHEARSAL"
"""In the environment of all that a stage starts, so that what outlives it is found."""
LEAVING_S = 30.0
"""For what a stage had started to go."""
COMPILER = "torch/_inductor/compile_worker"
"""PyTorch's own helpers look once a minute whether their parent is there, and go then."""
KILLED_AFTER, STOPPED_AFTER = 2, 1
"""Iterations that a life of the run makes before SIGKILL, and before SIGTERM."""
RUN = "runs/mine"
EXPORTS = "exports"
CLI = ["-m", "g2rpo_ray.cli"]
G2RPO = shlex.join(["python", *CLI])


@dataclass(frozen=True)
class Stage:
    """One command, and how it is to end."""

    name: str
    arguments: list[str]
    """Of Python."""
    needs_s: float
    """At true size on one H200: it is not begun with less, and ended at twice that."""
    exits: tuple[int, ...] = (0,)
    sends: signal.Signals | None = None
    after: int = 0
    """Iterations from its beginning, with their checkpoints, before the signal is sent."""
    makes: str | None = None
    """Folder that must not be there when it begins once more."""
    reads: str | None = None
    """Folder that an earlier one makes; it goes when this one was good."""
    beside: bool = False
    """It goes on beside those that follow, after those beside that are before it."""
    alone: bool = False
    """It waits for those beside, whose files it would meet."""


def stages_of(options: argparse.Namespace, config: Config) -> list[Stage]:
    """The README's commands for FLUX.1-dev, in its order; then the quickstart's."""
    recipe, settings = str(options.recipe), options.settings
    cluster = [setting for setting in options.overrides if setting.startswith("cluster.")]
    embedded, gpus = "data/hpdv2_t5", "0" if options.tiny else "1"
    train = [recipe, f"run_dir={RUN}", f"prompts.train={embedded}", *settings]
    plan = ["--json", "plan.json", *(["--card", options.card] if options.card else [])]
    plan += [] if options.tiny else ["--gpus", "1"]
    build = [str(measuring.ROOT / "scripts" / "true_size.py"), recipe, *settings]
    quickstart = [str(measuring.ROOT / "configs" / "quickstart.yaml"), "run_dir=runs/quickstart"]
    quickstart += [*cluster, *(measuring.settings("rehearse_quickstart") if options.tiny else [])]
    forms = {"adapter": [], "merged": ["--merged"]} if config.model.lora else {"full": []}
    # Seconds are those of one H200.
    found = [
        Stage("build", [*build, *(["--tiny"] if options.tiny else [])], 60, makes="models"),
        Stage("download", [*CLI, "download", recipe, "--dry-run", *settings], 15, beside=True),
        Stage(
            "embed",
            [*CLI, "embed", recipe, config.prompts.train, "--out", embedded, "--limit", "16",
             "--workers", "1", "--gpus-per-worker", gpus, *settings],
            60, makes=embedded,
        ),
        Stage("plan", [*CLI, "plan", *train, *plan], 20, beside=True),
        Stage("dry-run", [*CLI, "train", *train, "--dry-run"], 20, beside=True),
        # What it warns of is this machine's.
        Stage("doctor", [*CLI, "doctor", *train], 45, exits=(0, 1)),
        Stage(
            "train", [*CLI, "train", *train, "learner.learning_rate=1e-5"],
            220, (-signal.SIGKILL,), signal.SIGKILL, KILLED_AFTER, makes=RUN, alone=True,
        ),
        Stage(
            "resume", [*CLI, "train", f"{RUN}/config.yaml", "--resume", "auto"],
            180, (EXIT_REQUEUE,), signal.SIGTERM, STOPPED_AFTER,
        ),
    ]  # fmt: skip
    for form, flags in forms.items():
        folder = f"{EXPORTS}/{form}"
        export = [*CLI, "export", RUN, "--to", folder, *flags]
        loading = ["-c", f"import rehearse; rehearse.load({folder!r})"]
        needs_s = 40 if form == "adapter" else 90
        found += [
            Stage(form, export, needs_s, makes=folder, beside=True),
            Stage(f"load-{form}", loading, 60, reads=folder, beside=True),
        ]
    return [
        *found,
        Stage(
            "sample",
            [*CLI, "sample", RUN, "--prompt", "a lighthouse in a storm", "--count", "4",
             "--out", f"{EXPORTS}/sample"],
            60, makes=f"{EXPORTS}/sample", beside=True,
        ),
        Stage("evaluate", [*CLI, "evaluate", RUN, "--steps", "10,20,28"], 130),
        Stage("quickstart", [*CLI, "train", *quickstart], 90, makes="runs/quickstart"),
    ]  # fmt: skip


def load(folder: str) -> None:
    """Run what the export's own card says, on the card where there is one, and keep the picture."""
    import torch

    page = (Path(folder) / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None, f"{folder}/README.md says no code"
    text = code[1].replace("this folder", folder)
    if torch.cuda.is_available():
        text = text.replace("\npicture =", '\npipeline.to("cuda")\npicture =')
    print(text)
    names: dict[str, Any] = {}
    exec(compile(text, f"{folder}/README.md", "exec"), names)
    picture = f"{folder}.png"
    names["picture"].save(picture)
    print(f"{picture}: {names['picture'].size}, extrema {names['picture'].getextrema()}")


@dataclass
class Rehearsed:
    """What is read of an earlier call's ``--json``."""

    stages: dict[str, dict[str, Any]]


@dataclass
class Rehearsal:
    """The stages of a recipe in a folder, and what was seen of them."""

    work: Path
    json: Path
    tiny: bool
    settings: list[str]
    """That the recipe is walked with; commands have the word SETTINGS in their place."""
    content: dict[str, Any] = field(default_factory=lambda: {"stages": {}})
    lock: Lock = field(default_factory=Lock)

    def walk(self, stages: list[Stage], limit_s: float) -> bool:
        """Those that there is time for; whether all were begun, and ended as they are to."""
        until_s = time.monotonic() + limit_s
        ended: list[bool | None] = []
        aside: list[bool | None] = []
        begun: list[Future[None]] = []
        with ThreadPoolExecutor(1) as second:

            def go(stage: Stage, lane: list[bool | None]) -> None:
                # What follows one for which there was no time may need less, but also that one.
                if None not in lane:
                    lane.append(self.take(stage, until_s))

            for stage in stages:
                if None in ended:
                    break
                if stage.beside:
                    begun.append(second.submit(go, stage, aside))
                    continue
                if stage.alone:
                    wait(begun)
                go(stage, ended)
        for each in begun:
            each.result()
        return all([*ended, *aside])

    def take(self, stage: Stage, until_s: float) -> bool | None:
        """The stage, and a note of it; whether it was good, or None where there is no time."""
        left_s = until_s - time.monotonic()
        if left_s < (10 if self.tiny else stage.needs_s):
            print(f"{stage.name}: not begun, {left_s:.0f} s are left; the same call goes on")
            return None
        # Two cores, and others beside it: no limit for the tiny world is as fair as a card's.
        found = self.stage(stage, min(left_s, (5 if self.tiny else 2) * stage.needs_s))
        with self.lock:
            self.content["stages"][stage.name] = found
            measuring.write_json(self.json, self.content)
        return bool(found["good"])

    def stage(self, stage: Stage, limit_s: float) -> dict[str, Any]:
        """Run it; it is ended at its limit, with all that it has started."""
        command = shlex.join(["python", *stage.arguments]).replace(G2RPO, "g2rpo")
        command = command.replace(shlex.join(self.settings), "SETTINGS")
        print(f"\n{stage.name} (at most {limit_s:.0f} s): {command}")
        log = self.work / "logs" / f"{stage.name}.log"
        if stage.makes is not None and stage.name in self.content["stages"]:
            shutil.rmtree(self.work / stage.makes, ignore_errors=True)
        before, started_s = self.files(stage), time.monotonic()
        found: dict[str, Any] = {"command": command, "settings": self.settings}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *stage.arguments], cwd=self.work, env=self.environment(stage),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        watch = Watch(stage.name, self.work, log, card=not self.tiny)
        while (code := process.poll()) is None and time.monotonic() - started_s < limit_s:
            watch.look()
            due = watch.checkpoint() >= watch.began_at + stage.after
            if stage.sends is not None and due and "signal_s" not in found:
                found["signal_s"] = round(time.monotonic() - started_s, 1)
                process.send_signal(stage.sends)
            time.sleep(0.1 if self.tiny else 0.5)
        found |= {"seconds": round(time.monotonic() - started_s, 1), "exit_code": code}
        found |= {"iterations": watch.iterations, "card_peak_gib": watch.card_gib}
        found["processes_left"] = self.leftover(stage, LEAVING_S if code is not None else 0)
        found["gone_s"] = round(time.monotonic() - started_s, 1)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVING_S)
        found["left"] = left_by(before, self.files(stage))
        found["disk_free_gb"] = round(shutil.disk_usage(self.work).free / 1e9, 1)
        found["last_lines"] = watch.lines()[-8:]
        found["good"] = code in stage.exits and not found["processes_left"]
        print("\n".join(f"    {line}" for line in watch.lines()[-4 if found["good"] else -25 :]))
        if stage.reads is not None and found["good"]:
            shutil.rmtree(self.work / stage.reads)
        values = {k: v for k, v in found.items() if k not in ("command", "settings", "last_lines")}
        print(f"{stage.name}: {json.dumps(values)}")
        return found

    def files(self, stage: Stage) -> dict[str, tuple[int, int]]:
        """Those that are this stage's to write: of exports, or all others."""
        exports = (stage.makes or stage.reads or "").startswith(f"{EXPORTS}/")
        found = files_in(self.work)
        return {k: v for k, v in found.items() if k.startswith(f"{EXPORTS}/") == exports}

    def mark(self, stage: Stage) -> str:
        return f"{self.work} {stage.name}"

    def environment(self, stage: Stage) -> dict[str, str]:
        """Without a hub; scripts and package are found, whether installed or not."""
        paths = [str(measuring.ROOT), str(measuring.ROOT / "scripts")]
        given = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        given["PYTHONPATH"] = ":".join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(":")
        given |= {MARK: self.mark(stage), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        return given | ({"CUDA_VISIBLE_DEVICES": ""} if self.tiny else {})

    def leftover(self, stage: Stage, wait_s: float) -> list[str]:
        """Processes that are still there after ``wait_s``; they are ended, the compiler's too."""
        deadline_s = time.monotonic() + wait_s
        while (left := self.marked(stage)) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        names = [f"{process.pid} {command[:80]}" for process, command in left.items()]
        ended = [*left, *self.marked(stage, compiler=True)]
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ended, timeout=10)
        return names

    def marked(self, stage: Stage, compiler: bool = False) -> dict[psutil.Process, str]:
        """Processes that the stage has started, or those of the compiler; with their commands."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                ended = process.status() == psutil.STATUS_ZOMBIE
                command = " ".join(process.cmdline())
                mine = not ended and process.environ().get(MARK) == self.mark(stage)
                if mine and (COMPILER in command) == compiler:
                    found[process] = command
        return found

    def compare(self) -> list[dict[str, Any]]:
        """What the plan said beside what the first life's warm iterations took."""
        path, train = self.work / "plan.json", self.content["stages"].get("train", {})
        # The first iteration compiles.
        measured = [v for n, v in train.get("iterations", {}).items() if int(n) > 1]
        if not path.is_file() or not measured:
            return []
        plan = json.loads(path.read_text())
        rows = []
        for name in ("generate_s", "learn_s", "sync_s"):
            seconds = median(values[f"time/{name}"] for values in measured)
            rows.append({"": name, "predicted": plan["configured"][name], "measured": seconds})
        parts = {role: sum(gib.values()) for role, gib in plan["memory_gib"].items()}
        rows.append(
            {"": f"whole card, GiB: {', '.join(parts)}", "predicted": sum(parts.values()),
             "measured": train["card_peak_gib"]}
        )  # fmt: skip
        return rows


class Watch:
    """Looks at a stage while it runs: the run's numbers, the card's memory, its last words."""

    def __init__(self, name: str, work: Path, log: Path, card: bool) -> None:
        self.name, self.run, self.log, self.card = name, work / RUN, log, card
        self.started_s = self.said_s = self.asked_s = time.monotonic()
        self.card_gib: float | None = None
        self.known = read_metrics(self.run) if self.run.is_dir() else []
        self.iterations: dict[str, dict[str, float]] = {}
        self.began_at = self.checkpoint()

    def look(self) -> None:
        at_s = time.monotonic() - self.started_s
        for record in read_metrics(self.run) if self.run.is_dir() else []:
            number = str(record["iteration"])
            if record["kind"] == "train" and record not in self.known:
                self.known.append(record)
                times = {k: v for k, v in record.items() if k.startswith("time/")}
                self.iterations[number] = {"recorded_s": round(at_s, 1), **times}
        if time.monotonic() - self.said_s > 20:
            self.said_s = time.monotonic()
            print(f"  {self.name}, {at_s:.0f} s: {(self.lines() or [''])[-1][:150]}")
        if self.card and time.monotonic() - self.asked_s > 2:
            self.asked_s = time.monotonic()
            ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            # nvidia-smi shows all cards of the machine, also those of others.
            if cards := os.environ.get("CUDA_VISIBLE_DEVICES"):
                ask += ["--id", cards]
            answer = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
            mib = [int(line) for line in answer.split() if line.isdigit()]
            self.card_gib = max(self.card_gib or 0, round(max(mib, default=0) / 2**10, 2))

    def checkpoint(self) -> int:
        """Iteration of the newest whole one."""
        names = self.run.glob("checkpoints/iteration_*/state.json")
        return max((int(path.parent.name.partition("_")[2]) for path in names), default=0)

    def lines(self) -> list[str]:
        text = self.log.read_text(errors="replace").replace("\r", "\n")
        return [line for line in text.split("\n") if line.strip()]


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, by its path in the folder; without our own logs."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and (name := str(path.relative_to(folder)))[:5] != "logs/":
                found[name] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


def left_by(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> dict[str, str]:
    """New and changed files by their first two folders: how many, and their size."""
    groups: dict[str, list[int]] = {}
    for name, (size, _) in ((n, f) for n, f in now.items() if before.get(n) != f):
        groups.setdefault("/".join(Path(name).parent.parts[:2]), []).append(size)
    left = {g or ".": f"{len(s)} files, {sum(s) / 1e6:,.1f} MB" for g, s in groups.items()}
    gone = len(before.keys() - now.keys())
    return left | ({"removed": f"{gone} files"} if gone else {})


def table(content: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a stage."""
    return [
        {
            "stage": name, "good": "yes" if s["good"] else "NO", "s": s["seconds"],
            "exit": s["exit_code"], "left": "; ".join(f"{k}: {v}" for k, v in s["left"].items()),
            "command": s["command"],
        }
        for name, s in content["stages"].items()
    ]  # fmt: skip


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Config]:
    """Options with the recipe's settings for a rehearsal, ``options.settings``."""
    parser = measuring.make_parser(__doc__, needs_file=True)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help=f"({RECIPE.name})")
    parser.add_argument("--work", type=Path, required=True, help="folder that all of it goes to")
    parser.add_argument("--stages", help="of these alone, separated by commas, also once more")
    parser.add_argument("--limit-s", type=float, default=900.0, help="of this call (900)")
    parser.add_argument("--card", help="as of g2rpo plan")
    parser.add_argument("--tiny", action="store_true", help="the tiny world's files, on the CPU")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args(arguments)
    for name in ("recipe", "work", "json"):
        setattr(options, name, getattr(options, name).absolute())
    config = load_config(options.recipe)
    options.settings = measuring.settings("rehearse", f"rehearse_{config.algorithm}")
    options.settings += [*(tiny_settings(config) if options.tiny else []), *options.overrides]
    return options, load_config(options.recipe, options.settings)


def tiny_settings(config: Config) -> list[str]:
    """For a recipe with the tiny world's files where it expects those of true size."""
    small = measuring.settings("rehearse_tiny", *["rehearse_tiny_lora"] * bool(config.model.lora))
    for name, reward in config.rewards.items():
        scorer = {k: v for k, v in reward.options.items() if k != "dtype"}
        if reward.kind == "hps":
            scorer["architecture"] = "local-dir:tiny_world:hps"
        small.append(f"rewards.{name}.options={json.dumps(scorer)}")
        small += [f"rewards.{name}.gpus_per_replica=0", f"rewards.{name}.cpus_per_replica=0.1"]
    return small


def choose(known: list[Stage], asked: str | None, content: dict[str, Any]) -> list[Stage]:
    """Those asked for, or all that have no good result yet."""
    names = asked.split(",") if asked else []
    if unknown := set(names) - {stage.name for stage in known}:
        allowed = ", ".join(stage.name for stage in known)
        raise SystemExit(f"--stages: no {', '.join(sorted(unknown))}; there are: {allowed}")
    good = [name for name, found in content["stages"].items() if found["good"]]
    return [s for s in known if (s.name in names if names else s.name not in good)]


def main() -> int:
    """Returns 1 where a stage failed or was not begun."""
    options, config = parse()
    (options.work / "logs").mkdir(parents=True, exist_ok=True)
    rehearsal = Rehearsal(options.work, options.json, options.tiny, options.settings)
    if options.json.is_file():
        rehearsal.content["stages"] = measuring.read_json(options.json, Rehearsed).stages
    rehearsal.content["recipe"] = options.recipe.name
    print(f"{options.recipe.name}, SETTINGS: {shlex.join(options.settings)}")
    stages = choose(stages_of(options, config), options.stages, rehearsal.content)
    good = rehearsal.walk(stages, options.limit_s)
    rehearsal.content["compared"] = rehearsal.compare()
    measuring.write_json(options.json, rehearsal.content)
    for rows in (table(rehearsal.content), rehearsal.content["compared"]):
        if rows:
            measuring.print_table(rows)
    return 0 if good else 1


if __name__ == "__main__":
    program.run(main)
