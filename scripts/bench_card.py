"""A recipe's iterations on a card of a chosen size: memory over time by role, beside the plan's.

    python scripts/bench_card.py configs/flux_g2rpo_hps_40gb_lora.yaml --limit-gib 38 --out found
    ... --tiny                                            # the tiny world, host memory, on the CPU

Files of true size with random weights, then ``g2rpo train`` on them, with few prompts and SDE steps
(``settings.yaml``: card) and the trained rewards alone; ``key=value`` overrides any setting. A
process holds the rest of the card, so that all of the run's together have no more than the limit,
contexts included; shares of the card become those of one of that size. In ``found``: memory.csv,
memory.svg, result.json and the run's log, metrics.jsonl and summary.json.
"""

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

import measuring
import rehearse
from g2rpo_ray.config import Config, load_config
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
CONTEXTS = "contexts and others"
"""What no role's allocator knows of: contexts, libraries' own memory, mapped segments."""
COLOURS = ("#4878a8", "#d08040", "#58a068", "#b05868", "#8068a8", "#909090", "#c0a040", "#50a0a8")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 380, 50, 190, 20, 40

Sample = tuple[float, str, float, float, float]
"""Seconds, role, GiB reserved, GiB allocated, GiB free on the card (below 0: has none)."""


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
    tree = yaml.safe_load(options.recipe.read_text(encoding="utf-8"))
    tree["rewards"] = {n: r for n, r in tree["rewards"].items() if r.get("weight", 1) > 0}
    recipe = scratch / options.recipe.name
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return recipe


def train(recipe: Path, overrides: Sequence[str], options: argparse.Namespace) -> int | None:
    """Run it in the recipe's folder, watched; its exit code, or none at the time limit."""
    samples = recipe.parent / "samples"
    samples.mkdir()
    paths = [str(SCRIPTS / "watching"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "G2RPO_MEMORY_SAMPLES": str(samples), "PYTHONPATH": ":".join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    # The parent's cluster, if any, is not the run's.
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, *rehearse.CLI, "train", recipe.name, *overrides],
        cwd=recipe.parent, env=environment, start_new_session=True,
        stdout=(options.out / "run.log").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
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


def read_samples(folder: Path) -> list[Sample]:
    """Of all processes, seconds from the first one; processes of one role are numbered."""
    rows = []
    numbers: dict[str, list[str]] = defaultdict(list)
    for file in sorted(folder.glob("*.csv"), key=lambda path: path.stat().st_mtime_ns):
        for tick, role, *held in csv.reader(file.open()):
            if len(held) == 3:
                gib = [int(h) / measuring.GIB if int(h) >= 0 else -1.0 for h in held]
                rows.append((float(tick), role, file.stem, gib))
                if file.stem not in numbers[role]:
                    numbers[role].append(file.stem)
    first = min((row[0] for row in rows), default=0.0)
    names = {
        (role, pid): f"{role} {n}" if len(pids) > 1 else role
        for role, pids in numbers.items()
        for n, pid in enumerate(pids)
    }
    return sorted((t - first, names[role, pid], *held) for t, role, pid, held in rows)  # type: ignore[misc]


def layers_of(samples: Sequence[Sample], left_gib: float | None) -> dict[str, list[float]]:
    """By role the GiB reserved at every tick (``seconds``), then what the card holds beyond it.

    Args:
        left_gib: of the card for all of them; none for host memory.
    """
    by_tick: dict[float, dict[str, Sample]] = defaultdict(dict)
    for sample in samples:
        if left_gib is None or sample[4] >= 0:
            by_tick[sample[0]][sample[1]] = sample
    ticks = sorted(by_tick)
    roles = sorted({role for found in by_tick.values() for role in found})
    layers: dict[str, list[float]] = {"seconds": ticks} | {role: [] for role in roles}
    last: dict[str, Sample] = {}
    for tick in ticks:
        # A process that was late for one tick still holds what it had.
        last = {r: s for r, s in last.items() if tick - s[0] <= 2} | by_tick[tick]
        for role in roles:
            layers[role].append(last[role][2] if role in last else 0.0)
    if left_gib is not None:
        free = [min(s[4] for s in by_tick[tick].values()) for tick in ticks]
        known = [sum(layers[role][n] for role in roles) for n in range(len(ticks))]
        layers[CONTEXTS] = [max(0.0, left_gib - f - k) for f, k in zip(free, known, strict=True)]
    return layers


def draw(layers: dict[str, list[float]], lines: dict[str, float]) -> str:
    """Stacked areas over the seconds, and horizontal lines by their names, as SVG."""
    ticks = layers["seconds"]
    roles = [name for name in layers if name != "seconds"]
    highest = max(*(sum(layers[r][n] for r in roles) for n in range(len(ticks))), *lines.values())
    right, low = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(second: float) -> float:
        return round(LEFT + (right - LEFT) * second / max(ticks[-1], 1.0), 1)

    def y(gib: float) -> float:
        return round(low - (low - TOP) * gib / (highest * 1.05), 1)

    def text(left: float, at: float, words: str, anchor: str) -> str:
        return f'<text x="{left}" y="{at}" text-anchor="{anchor}">{words}</text>'

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    base = [0.0] * len(ticks)
    for n, role in enumerate(roles):
        top = [b + v for b, v in zip(base, layers[role], strict=True)]
        edge = [*zip(ticks, top, strict=True), *reversed([*zip(ticks, base, strict=True)])]
        colour, beside = COLOURS[n % len(COLOURS)], low - 18 * n
        shape = " ".join(f"{x(t)},{y(v)}" for t, v in edge)
        parts.append(f'<polygon points="{shape}" fill="{colour}"/>')
        parts.append(
            f'<rect x="{right + 6}" y="{beside - 9}" width="9" height="9" fill="{colour}"/>'
        )
        parts.append(text(right + 20, beside, f"{role} {max(layers[role]):.1f}", "start"))
        base = top
    for name, gib in lines.items():
        parts.append(f'<path d="M{LEFT} {y(gib)}H{right}" stroke="#333" stroke-dasharray="5 3"/>')
        parts.append(text(right + 4, y(gib) + 4, f"{name} {gib:.1f}", "start"))
    for step in range(6):
        second, gib = ticks[-1] * step / 5, highest * step / 5
        parts.append(text(x(second), low + 16, f"{second:.0f}", "middle"))
        parts.append(text(LEFT - 6, y(gib) + 4, f"{gib:.0f}", "end"))
    parts.append(
        text(LEFT, HEIGHT - 6, "seconds; GiB reserved, and the peak of each role", "start")
    )
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
    return "\n".join([head, *parts, "</svg>\n"])


def planned_gib(config: Config, card: str | None) -> dict[str, dict[str, float]]:
    """The plan's memory by role, and the sum of those on the card with one process each."""
    memory: dict[str, dict[str, float]] = as_json(make_plan(config, load_costs(), None, card))[
        "memory_gib"
    ]
    on_cpu = {f"reward {n}" for n, r in config.rewards.items() if r.gpus_per_replica == 0}
    return {role: gib for role, gib in memory.items() if card is None or role not in on_cpu}


def report(
    options: argparse.Namespace, config: Config, run: Path, left_gib: float | None
) -> dict[str, Any]:
    """What there is of results, also where the run failed; written beside the plot."""
    samples = read_samples(run.parent / "samples")
    with (options.out / "memory.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["seconds", "role", "reserved_gib", "allocated_gib", "card_free_gib"])
        writer.writerows([t, role, *(round(h, 3) for h in held)] for t, role, *held in samples)
    plan = planned_gib(config, None if options.tiny else options.card)
    planned = {role: round(sum(gib.values()), 2) for role, gib in plan.items()}
    bare = {role: round(sum(gib.values()) - gib.get("reserve", 0), 2) for role, gib in plan.items()}
    layers = layers_of(samples, left_gib)
    whole = [sum(column) for column in zip(*list(layers.values())[1:], strict=True)]
    found: dict[str, Any] = {
        "limit_gib": left_gib, "peak_of_all_gib": round(max(whole, default=0), 2),
        "peak_reserved_gib": {r: round(max(v), 2) for r, v in layers.items() if r != "seconds"},
        "peak_allocated_gib": {
            role: round(max(s[3] for s in samples if s[1] == role), 2)
            for role in sorted({s[1] for s in samples})
        },
        "planned_gib": planned, "planned_without_margin_gib": bare,
    }  # fmt: skip
    if layers["seconds"]:
        lines = {"plan": sum(planned.values()), "plan, no margin": sum(bare.values())}
        lines |= {} if left_gib is None else {"limit": left_gib}
        (options.out / "memory.svg").write_text(draw(layers, lines))
    records = read_metrics(run) if run.is_dir() else []
    keys = [f"time/{name}_s" for name in ("generate", "learn", "sync", "iteration")]
    keys += ["policy/first_max_abs_log_ratio", "rollout/evaluations"]
    found["iterations"] = [{k: r.get(k) for k in keys} for r in records if r["kind"] == "train"]
    for name in ("metrics.jsonl", "summary.json"):
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
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=400.0, help="of everything (400)")
    parser.add_argument("--card", default="H200", help="whose seconds the plan has (H200)")
    parser.add_argument("--tiny", action="store_true", help="the tiny world, on the CPU")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_intermixed_args()
    options.recipe, options.out = options.recipe.absolute(), options.out.absolute()
    options.began_s = time.monotonic()
    return options


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    recipe = write_recipe(options, scratch)
    overrides = [f"iterations={options.iterations}", "run_dir=run", *measuring.settings("card")]
    if options.tiny:
        overrides += rehearse.tiny_settings(load_config(recipe))
    overrides += options.overrides
    config = load_config(recipe, overrides)
    print("writing files")
    how = "--tiny" if options.tiny else "--embedded"
    build = [sys.executable, str(SCRIPTS / "true_size.py"), how, recipe.name, *overrides]
    # In a process of its own: its context would count.
    subprocess.run(build, cwd=scratch, check=True)
    found: dict[str, Any] = {"recipe": recipe.stem, "overrides": options.overrides}
    found["files_s"] = round(time.monotonic() - options.began_s, 1)
    if options.tiny:
        found["exit_code"] = train(recipe, overrides, options)
        return found | report(options, config, scratch / "run", None)
    with ballast(options.limit_gib) as (left_gib, total_gib):
        shares = shares_of(config, left_gib / total_gib)
        found["exit_code"] = train(recipe, [*overrides, *shares], options)
    return found | report(options, config, scratch / "run", left_gib)


def main() -> int:
    """Returns 1 where the run did not end well."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Where the recipe's files are.
        os.chdir(scratch)
        found = measure(options, Path(scratch))
    measuring.write_json(options.out / "result.json", found)
    print(json.dumps(found, indent=1))
    if found["exit_code"] != 0:
        print("".join((options.out / "run.log").read_text().splitlines(True)[-40:]))
    return 0 if found["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
