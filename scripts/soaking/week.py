"""A week in an hour: a thousand iterations under a moody judge, with workers that come and go.

Runs in one folder, each on a cluster of its own, and each goes on where it was left:

- ``quiet``: nobody disturbs it;
- ``disturbed``: the same settings, and everything below;
- ``one_step_off``: likewise, with that pipeline.

Roles that stay live on one node, workers and evaluation beside training on another one, which is
taken away now and then. Everything comes at iterations that are known before.
"""

import json
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

import measuring
from g2rpo_ray.config import Config
from g2rpo_ray.tracking.metrics import read_metrics
from soaking.cluster import TITLES, Driver, Nodes, clean_nodes, left_at_last, stop
from soaking.judge import RANGE, Judge, judging
from soaking.watch import growth, sample

RUNS = {"quiet": [], "disturbed": [], "one_step_off": ["pipeline=one_step_off"]}
"""Run -> its settings beside those of all."""
HEAD = {"num_cpus": 1, "labels": {"soak": "stays"}}
SPOT = {"num_cpus": 1, "labels": {"soak": "goes"}}
MOODS = {"slow": 8.0, "limiting": 8.0, "wrong": 8.0, "silent": 15.0, "down": 15.0}
"""Mood of the judge -> how long, in seconds."""
LONG_DOWN_S, LONG_DOWNS = 150.0, 2
"""So often in a whole run it is down for minutes."""
MOOD_EVERY, KILL_EVERY, NODE_EVERY = 20, 8, 100
"""Iterations between two moods, two workers killed, two times that their node goes."""
NODE_FIRST = 45
"""Between two moods: while there is no worker, nobody asks the judge."""
SAMPLE_EVERY, POLL_S = 5, 0.25
SETTLED = 100
"""From this iteration on (a third of a shorter run) nothing may grow."""
MOST_GROWTH, LEAST_GROWTH_MIB, MOST_NEW_FILES = 0.05, 8.0, 8
"""Of a role's memory: whichever of the two is more; and of its open files and threads."""
SWINGS_MIB = {"raylet": 64.0, "store": 32.0}
"""Instead of ``LEAST_GROWTH_MIB``: so much comes and goes with the objects under way, also in a run
that nobody disturbs, and a short run has too few samples to see past it."""
MOST_DEATHS = 5
"""Of the driver; then the soak gives up."""


@dataclass
class Plan:
    """What comes at which iteration: the same in every life of a run."""

    iterations: int
    disturbed: bool

    def moods(self) -> dict[int, tuple[str, float]]:
        """Iteration -> the judge's mood from then on, and for how many seconds."""
        if not self.disturbed:
            return {}
        # Each of them also in a short run.
        every = max(1, min(MOOD_EVERY, self.iterations // (2 * len(MOODS))))
        starts = range(every // 2, self.iterations - 3, every)
        found = {at: list(MOODS.items())[place % len(MOODS)] for place, at in enumerate(starts)}
        downs = [at for at, (mood, _) in found.items() if mood == "down"]
        for at in downs[2 :: max(1, len(downs) // LONG_DOWNS)]:
            found[at] = "down", LONG_DOWN_S
        return found

    def losses(self) -> dict[int, str]:
        """Iteration -> ``worker`` or ``node``: what is taken away."""
        if not self.disturbed:
            return {}
        found = dict.fromkeys(range(KILL_EVERY, self.iterations - 3, KILL_EVERY), "worker")
        return found | dict.fromkeys(range(NODE_FIRST, self.iterations - 3, NODE_EVERY), "node")


def week_config(folder: Path, name: str, address: str, judge: Judge, iterations: int) -> Config:
    """The quickstart, made as small as it gets, with the judge as a reward."""
    overrides = [
        *measuring.settings("soak", "soak_freeze", "soak_week"),
        *RUNS[name],
        f"run_dir={folder / name}",
        f"cluster.address={address}",
        f"iterations={iterations}",
    ]
    config = measuring.run_config(overrides, ["clip"])
    options = {"url": judge.url, "timeout_s": 280, "tries": 1000}
    options |= dict(zip(("minimum", "maximum"), RANGE, strict=True))
    settings = config.model_dump(mode="json")
    settings["rewards"]["judge"] = settings["rewards"]["clip"] | {
        "kind": "http", "options": options, "timeout_s": 300, "retries": 4
    }  # fmt: skip
    return Config.model_validate(settings)


class Ledger:
    """What has happened to a run, in all of its lives: one JSON object a line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        text = file.read_text() if file.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def add(self, what: str, iteration: int, **values: Any) -> None:
        line = {"what": what, "iteration": iteration, "at_s": round(time.time(), 1), **values}
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["what"] in kinds]


class Week:
    """Looks after one run from its start, or from where it was left, to its end."""

    def __init__(self, nodes: Nodes, driver: Driver, judge: Judge, plan: Plan, ledger: Ledger):
        self.nodes, self.driver, self.judge, self.ledger = nodes, driver, judge, ledger
        self.chance = random.Random(0)
        self.moods, self.losses = plan.moods(), plan.losses()
        self.mood_ends_s, self.sampled = 0.0, -1

    def go_on(self, limit_s: float) -> bool:
        """Whether the run has come to its end within the time; else it was stopped."""
        started_s = time.monotonic()
        # What its lives before have met does not come again.
        seen = max((line["iteration"] for line in self.ledger.lines), default=-1)
        self.moods = {at: it for at, it in self.moods.items() if at > seen}
        self.losses = {at: it for at, it in self.losses.items() if at > seen}
        while (code := self.driver.process.poll()) != 0:
            iteration = self.driver.iterations()
            if code is not None:
                self.ledger.add("death", iteration, code=code)
                if len(self.ledger.of("death")) > MOST_DEATHS:
                    raise RuntimeError(f"the driver ended again and again: {self.driver.log}")
                self.driver.start()
            if time.monotonic() - started_s > limit_s:
                self.judge.mood = "fair"
                self.ledger.add("stop", iteration, **stop(self.driver))
                return False
            self.disturb(iteration)
            if iteration >= self.sampled + SAMPLE_EVERY:
                self.sampled = iteration
                self.ledger.add("sample", iteration, **sample(self.nodes, self.driver))
            time.sleep(POLL_S)
        return True

    def disturb(self, iteration: int) -> None:
        """What the plan has for this iteration, and for those that went by unseen."""
        if self.mood_ends_s and time.monotonic() > self.mood_ends_s:
            self.judge.mood, self.mood_ends_s = "fair", 0.0
        for at in sorted(at for at in self.moods if at <= iteration):
            mood, seconds = self.moods.pop(at)
            self.judge.mood, self.mood_ends_s = mood, time.monotonic() + seconds
            self.ledger.add("mood", at, mood=mood, seconds=seconds)
            print(f"iteration {iteration}: the judge is {mood} for {seconds:g} s")
        for at in sorted(at for at in self.losses if at <= iteration):
            lost = self.losses.pop(at)
            if lost == "node":
                self.nodes.kill_second()
                self.nodes.add_second()
            elif workers := self.nodes.workers(TITLES["worker"]):
                with suppress(psutil.NoSuchProcess):
                    self.chance.choice(workers).send_signal(signal.SIGKILL)
            self.ledger.add("loss", at, lost=lost)
            print(f"iteration {iteration}: lost a {lost}")


def run_one(name: str, folder: Path, iterations: int, limit_s: float) -> None:
    """One of ``RUNS``, from where it stands; ``<name>.ended.json`` says that it is done."""
    ended, settings = folder / f"{name}.ended.json", folder / f"{name}.yaml"
    if ended.exists():
        return
    port = 0
    if settings.exists():
        # A run goes on with the judge that it began with.
        url = yaml.safe_load(settings.read_text())["rewards"]["judge"]["options"]["url"]
        port = int(url.rstrip("/").rpartition(":")[2])
    ledger = Ledger(folder / f"{name}.events.jsonl")
    leaks: dict[str, list[str]] = {}
    with judging(port) as judge, clean_nodes(leaks, HEAD, SPOT) as nodes:
        address = nodes.cluster.address
        driver = Driver(folder, week_config(folder, name, address, judge, iterations))
        ledger.add("begin", driver.iterations())
        week = Week(nodes, driver, judge, Plan(iterations, name != "quiet"), ledger)
        try:
            whole = week.go_on(limit_s)
            ledger.add("end", driver.iterations(), answers=dict(judge.answers))
            leaks |= left_at_last(nodes, address) if whole else {}
        finally:
            driver.kill()
    if whole:
        ended.write_text(json.dumps(leaks))


def report_of(name: str, folder: Path) -> dict[str, Any]:
    """One run, as its folder and its ledger have it."""
    ledger = Ledger(folder / f"{name}.events.jsonl")
    samples, summary = ledger.of("sample"), folder / name / "summary.json"
    records = [r for r in read_metrics(folder / name) if r["kind"] == "train"]
    trained = Counter(r["iteration"] for r in records)
    whole = summary.exists() and (folder / f"{name}.ended.json").exists()
    result = json.loads(summary.read_text()) if whole else {}
    ended = json.loads((folder / f"{name}.ended.json").read_text()) if whole else {}
    iterations = max(trained, default=0)
    answers = sum((Counter(it["answers"]) for it in ledger.of("end")), Counter[str]())
    grown = growth(samples, min(SETTLED, iterations // 3))
    return {
        "iterations": iterations,
        "whole": whole,
        "checksum": result.get("weights_checksum"),
        "evaluations": result.get("evaluations"),
        "seconds": seconds_of(ledger),
        "iterations_twice_or_lost": sum(trained[i] != 1 for i in range(1, iterations + 1)),
        "groups": sum(r["groups/trained"] for r in records),
        "most_staleness": max((r["rollout/staleness"] for r in records), default=0),
        "moods": dict(Counter(it["mood"] for it in ledger.of("mood"))),
        "requests": dict(sorted(answers.items())),
        "losses": dict(Counter(it["lost"] for it in ledger.of("loss"))),
        "driver_deaths": len(ledger.of("death")),
        "leaks": {what: found for what, found in ended.items() if found},
        "growth": grown,
        "grew": [name for name, it in grown.items() if grew(name, it["early"], it["late"])],
        "samples": spread(samples),
    }


def seconds_of(ledger: Ledger) -> float:
    """Of all lives together."""
    total, began_s = 0.0, 0.0
    for line in ledger.of("begin", "end"):
        if line["what"] == "begin":
            began_s = line["at_s"]
        else:
            total += line["at_s"] - began_s
    return round(total, 1)


def grew(name: str, early: float, late: float) -> bool:
    """Whether what should be flat is not.

    The disk holds a line of numbers for each iteration, Ray a log of each worker, and
    its GCS the last 100,000 tasks and ended actors; all memory together depends on who is there.
    """
    if name in ("disk", "ray_logs", "pss", "gcs pss", "gcs rss"):
        return False
    if name.endswith(("files", "threads", "objects")):
        return late - early > MOST_NEW_FILES
    least_mib = SWINGS_MIB.get(name.split()[0], LEAST_GROWTH_MIB)
    return late - early > max(least_mib, MOST_GROWTH * early)


def spread(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Eight samples, evenly over the run, for a table."""
    places = {round(i * (len(samples) - 1) / 7) for i in range(8)} if samples else set()
    return [
        {
            "iteration": it["iteration"],
            **{f"{role}_pss": round(v["pss"], 1) for role, v in it["roles"].items()},
            **{f"{role}_files": int(v["files"]) for role, v in it["roles"].items()},
            **{key: round(it[key], 1) for key in ("pss", "store", "objects", "disk", "ray_logs")},
        }
        for it in (samples[place] for place in sorted(places))
    ]


def run(folder: Path, iterations: int, names: list[str], limit_s: float) -> dict[str, Any]:
    """These runs, then a report on all that the folder has."""
    for name in names:
        run_one(name, folder, iterations, limit_s)
    known = [name for name in RUNS if (folder / f"{name}.events.jsonl").exists()]
    reports = {name: report_of(name, folder) for name in known}
    pair = [reports[name] for name in ("quiet", "disturbed") if name in reports]
    compared = len(pair) == 2 and all(it["whole"] for it in pair)
    return {
        "checksum_equal": pair[0]["checksum"] == pair[1]["checksum"] if compared else None,
        "evaluations_equal": pair[0]["evaluations"] == pair[1]["evaluations"] if compared else None,
        "good": compared
        and pair[0]["checksum"] == pair[1]["checksum"]
        and not any(
            it["iterations_twice_or_lost"] or it["driver_deaths"] or it["leaks"] or it["grew"]
            for it in reports.values()
        ),
        "runs": reports,
    }
