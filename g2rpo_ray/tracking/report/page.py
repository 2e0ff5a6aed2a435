"""The report of a run: one HTML file that needs no network and no other file."""

import base64
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from markupsafe import Markup
from PIL import Image

from g2rpo_ray.common.files import cause_of, replace_text
from g2rpo_ray.common.formatting import NOTHING, format_seconds
from g2rpo_ray.common.secrets import publishable
from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import config_from_dict
from g2rpo_ray.plan.arithmetic import arithmetic
from g2rpo_ray.tracking.report.charts import Series, line_chart, stacked_bars
from g2rpo_ray.tracking.report.render import PIXELATED_BELOW, render
from g2rpo_ray.tracking.report.run_folder import RunFolder, read_run_folder

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#3867b8", "#d9822b", "#2f8f63", "#b3372f", "#7a5cad", "#b4bac4",
)  # fmt: skip
PALE_BLUE = "#a9bfe3"
ROLES = {
    "generate": BLUE, "learn": ORANGE, "sync": GREEN, "evaluate": PURPLE, "checkpoint": RED,
}  # fmt: skip
"""What the driver waits for (``time/<role>_s``), with its colour."""
SIDES = (384, 256, 192, 128, 96)
"""Longer sides of embedded pictures, in pixels: the largest with which all of them fit."""
EMBEDDED_BYTES = 8 * 10**6
"""Of all pictures of a report."""


@dataclass(frozen=True)
class Picture:
    """A picture to embed, or why there is none."""

    url: str = ""
    file: str = ""
    """The picture at its own size, as a URL from the report's folder."""
    small: bool = False
    """Enlarged with sharp pixels."""
    absent: str = ""


@dataclass(frozen=True)
class Prompt:
    """One prompt's card: before training and after it, or one of them where there is one."""

    text: str
    pictures: dict[int, Picture]
    """By iteration."""
    scores: dict[str, list[float | None]]
    """By reward, trained ones first: one score for each picture."""


def write_report(run_dir: Path, live: bool = False) -> Path:
    """Write ``report.html`` from what the run folder holds, and return its path.

    A part of the folder that is missing or broken is named in the report; the rest is shown. A
    ``live`` one, of a run that goes on, loads itself again from time to time.
    """
    run = read_run_folder(run_dir)
    iterations = sorted({record["iteration"] for record in run.records})
    spent = _seconds_by_role(run, iterations)
    unfinished = not run.summary and len(run.evaluated) > 1
    page = render(
        "report.html",
        name=run_dir.resolve().name,
        run=run,
        missing=[] if live else run.missing,
        renewed=time.strftime("%H:%M:%S UTC", time.gmtime()) if live else None,
        facts=_facts(run),
        after=f"iteration {run.evaluated[-1]}" if unfinished else "after",
        prompts=heldout_prompts(run),
        reward_charts=[_reward_chart(run, name) for name in run.rewards],
        tradeoff_charts=_tradeoff_charts(run),
        policy_charts=_policy_charts(run),
        role_s={role: sum(seconds) for role, seconds in spent.items()},
        total_s=sum(map(sum, spent.values())),
        evaluations_per_s=run.total("rollout/evaluations")
        / max(run.total("time/generate_s"), 1e-9),
        time_chart=stacked_bars(
            "Seconds of an iteration, by role",
            [
                Series(role, ROLES.get(role, GREY), list(zip(iterations, seconds, strict=True)))
                for role, seconds in spent.items()
            ],
        ),
        what_was_run=_what_was_run(run),
        settings=yaml.safe_dump(publishable(run.config), sort_keys=False, allow_unicode=True),
    )
    path = run_dir / "report.html"
    replace_text(path, page)
    return path


def _facts(run: RunFolder) -> dict[str, Any]:
    seed = run.summary.get("seed", run.config.get("seed"))
    planned = run.config.get("iterations", run.iterations)
    trained_s = sum(run.total(f"time/{phase}_s") for phase in ("generate", "learn", "sync"))
    evaluations = run.summary.get("evaluations", int(run.total("rollout/evaluations")))
    peak = run.summary.get("peak_rss_gib")
    early = run.summary.get("stopped_early", False)
    return {
        "Algorithm": run.summary.get("algorithm", run.config.get("algorithm")) or NOTHING,
        "Model": run.config.get("model", {}).get("path") or NOTHING,
        "Seed": NOTHING if seed is None else seed,
        "Iterations": f"{run.iterations} of {planned}{', ended early' * early}",
        "Training time": format_seconds(run.summary.get("train_s", trained_s)),
        "Evaluations of the model": f"{evaluations:,}",
        "Peak memory": NOTHING if peak is None else f"{peak:.2f} GiB",
    }


def heldout_prompts(run: RunFolder) -> list[Prompt]:
    """What was drawn first and last, prompt by prompt; smaller where there are many pictures."""
    for side in SIDES:
        prompts = _prompts_with(run, side)
        if sum(len(p.url) for one in prompts for p in one.pictures.values()) <= EMBEDDED_BYTES:
            break
    return prompts


def _prompts_with(run: RunFolder, side: int) -> list[Prompt]:
    shown = run.pictures[:1] + run.pictures[1:][-1:]
    prompts = []
    # With guards the first evaluation keeps more.
    for place in shown[-1].by_place() if shown else []:
        entries = [drawn.by_place().get(place) for drawn in shown]
        scores = [entry["scores"] if entry else {} for entry in entries]
        prompts.append(
            Prompt(
                text=next(entry["prompt"] for entry in entries if entry),
                pictures={
                    drawn.iteration: _picture(run.path, drawn.folder, entry, side)
                    for drawn, entry in zip(shown, entries, strict=True)
                },
                scores={
                    name: [one.get(name) for one in scores]
                    for name in run.trained_first({name for one in scores for name in one})
                },
            )
        )
    return prompts


def _picture(run_dir: Path, folder: Path, entry: Mapping[str, Any] | None, side: int) -> Picture:
    if entry is None:
        return Picture(absent="not drawn")
    path = (folder / entry["file"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        return Picture(absent="lies outside the run folder")
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except FileNotFoundError:
        return Picture(absent=f"{path.name} is missing")
    except (OSError, SyntaxError) as error:  # Pillow's ways to say that a file is broken
        return Picture(absent=f"{path.name} cannot be read: {cause_of(error, path)}")
    file = quote(str(path.relative_to(run_dir.resolve())))
    small = max(picture.size) < PIXELATED_BELOW
    return Picture(_data_url(picture, side), file, small)


def _data_url(picture: Image.Image, side: int) -> str:
    file = io.BytesIO()
    if max(picture.size) > side:
        picture.thumbnail((side, side))
        picture.save(file, "JPEG", quality=88)
        kind = "jpeg"
    else:
        picture.save(file, "PNG", optimize=True)
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _reward_chart(run: RunFolder, name: str) -> Markup:
    return line_chart(
        name if name in run.trained_rewards else f"{name} (not trained on)",
        [
            Series("mean of an iteration", PALE_BLUE, run.points(f"reward/{name}/mean")),
            Series("held-out prompts", BLUE, run.points(f"heldout/{name}"), dots=True),
        ],
    )


def _tradeoff_charts(run: RunFolder) -> list[Markup]:
    """Held-out means of each reward that is not trained on against each that is: a line that falls
    to the right is the price of training."""
    means = {name: dict(run.points(f"heldout/{name}")) for name in run.rewards}
    trained = [name for name in run.rewards if name in run.trained_rewards]
    charts = []
    for name, other in product(trained, [it for it in run.rewards if it not in trained]):
        both = [(x, means[other].get(n)) for n, x in sorted(means[name].items()) if x is not None]
        if sum(y is not None for _, y in both) > 1:
            line = Series("an evaluation each", BLUE, both, dots=True)
            first = Series("the first", ORANGE, both[:1], dots=True)
            charts.append(
                line_chart(
                    f"{other} (not trained on) over {name}",
                    [line, first],
                    over=f"held-out mean of {name}",
                )
            )
    return charts


def _policy_charts(run: RunFolder) -> list[Markup]:
    colours = list(zip(run.rewards, (BLUE, ORANGE, GREEN, PURPLE, RED), strict=False))
    charts = {
        "Advantages": [
            ("mean |advantage|", BLUE, "advantage/abs_mean"),
            ("share clamped", ORANGE, "advantage/clamped_share"),
        ],
        "Share of groups whose scores do not differ": [
            (name, colour, f"reward/{name}/constant_share") for name, colour in colours
        ],
        "Largest |Δlog p|": [
            ("all updates", BLUE, "policy/max_abs_log_ratio"),
            ("before the first", RED, "policy/first_max_abs_log_ratio"),
        ],
        "Share of branches clipped": [
            ("above", BLUE, "policy/clip_fraction_high"),
            ("below", ORANGE, "policy/clip_fraction_low"),
        ],
        "Gradient norm, before it is limited": [
            ("mean of an iteration's updates", BLUE, "policy/grad_norm")
        ],
    }
    weights = [(name, colour, f"reward/{name}/weight") for name, colour in colours]
    if any(run.points(metric) for _, _, metric in weights):
        charts["Weights of the trained rewards, which guards lower"] = weights
    drawn = [
        line_chart(
            title,
            [Series(label, colour, run.points(metric)) for label, colour, metric in lines],
            from_zero=True,
        )
        for title, lines in charts.items()
    ]
    kl = Series("KL(old || new)", BLUE, run.points("policy/approx_kl"))
    return [*drawn, line_chart("Approximate KL of an iteration, nat", [kl])]


def _seconds_by_role(run: RunFolder, iterations: list[int]) -> dict[str, list[float]]:
    """Seconds of each iteration; what no role accounts for is ``other``."""

    def by_iteration(name: str) -> list[float]:
        # Training and evaluation of an iteration are separate records.
        sums = dict.fromkeys(iterations, 0.0)
        for iteration, value in run.points(name):
            sums[int(iteration)] += value or 0.0
        return list(sums.values())

    spent = {role: by_iteration(f"time/{role}_s") for role in ROLES}
    named = [sum(column) for column in zip(*spent.values(), strict=True)]
    whole = by_iteration("time/iteration_s")
    spent["other"] = [max(0.0, all_ - some) for all_, some in zip(whole, named, strict=True)]
    return spent


def _what_was_run(run: RunFolder) -> dict[str, str]:
    try:
        counts = arithmetic(config_from_dict(run.config, "config.yaml"))
    except ConfigError:
        # Written by another version, or by hand: the settings below still say what was run.
        counts = {}
    rows = {name.capitalize(): text for name, text in counts.items()}
    if "weights_checksum" in run.summary:
        rows["Checksum of the final weights"] = str(run.summary["weights_checksum"])
    if versions := run.summary.get("versions"):
        rows["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return rows
