"""The report of a run: one HTML file that needs no network and no other file."""

import base64
import io
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from g2rpo_ray.common.files import replace_text
from g2rpo_ray.common.formatting import NOTHING, format_change, format_score, format_seconds
from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import config_from_dict
from g2rpo_ray.plan.arithmetic import arithmetic
from g2rpo_ray.tracking.report.charts import Series, line_chart, stacked_bars
from g2rpo_ray.tracking.report.run_folder import HeldoutPictures, RunFolder, read_run_folder
from g2rpo_ray.tracking.report.style import CSS

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#3867b8", "#d9822b", "#2f8f63", "#b3372f", "#7a5cad", "#b4bac4",
)  # fmt: skip
PALE_BLUE = "#a9bfe3"
ROLES = {
    "generate": BLUE, "learn": ORANGE, "sync": GREEN, "evaluate": PURPLE, "checkpoint": RED,
}  # fmt: skip
"""What the driver waits for (``time/<role>_s``), with its colour."""
LARGEST_SIDE = 384
"""Pictures are embedded at most so large, in pixels: the report stays small."""
PIXELATED_BELOW = 200
"""Pictures smaller than this are enlarged with sharp pixels instead of a blur."""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` from what the run folder holds, and return its path.

    A part of the folder that is missing or broken is named in the report; the rest is shown.
    """
    run = read_run_folder(run_dir)
    sections = [
        _header(run),
        _heldout(run),
        _pictures(run),
        _rewards(run),
        _policy(run),
        _time(run),
        _how(run),
    ]
    title = f"{run_dir.resolve().name} · g2rpo-ray"
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )
    path = run_dir / "report.html"
    replace_text(path, page)
    return path


def _header(run: RunFolder) -> str:
    algorithm = run.summary.get("algorithm", run.config.get("algorithm"))
    model = run.config.get("model", {}).get("path")
    seed = run.summary.get("seed", run.config.get("seed"))
    planned = run.config.get("iterations", run.iterations)
    trained_s = sum(run.total(f"time/{phase}_s") for phase in ("generate", "learn", "sync"))
    seconds = run.summary.get("train_s", trained_s)
    evaluations = run.summary.get("evaluations", int(run.total("rollout/evaluations")))
    peak = run.summary.get("peak_rss_gib")
    early = run.summary.get("stopped_early", False)
    facts = {
        "Algorithm": algorithm or NOTHING,
        "Model": model or NOTHING,
        "Seed": NOTHING if seed is None else seed,
        "Iterations": f"{run.iterations} of {planned}{', ended early' * early}",
        "Training time": format_seconds(seconds),
        "Evaluations of the model": f"{evaluations:,}",
        "Peak memory": NOTHING if peak is None else f"{peak:.2f} GiB",
    }
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
    )
    return (
        f'<p class="soft">g2rpo-ray, report of a run</p><h1>{escape(run.path.resolve().name)}</h1>'
        f'{_missing(run)}<dl class="facts">{cells}</dl>'
    )


def _missing(run: RunFolder) -> str:
    if not run.missing:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in run.missing)
    return f'<div class="missing"><b>Not everything is here</b><ul>{items}</ul></div>'


def _heldout(run: RunFolder) -> str:
    if not run.heldout:
        return ""
    broken_off = not run.summary and len(run.evaluated) > 1
    after = f"iteration {run.evaluated[-1]}" if broken_off else "after"
    rows = "".join(
        f"<tr><th>{_reward_name(run, name)}</th><td>{format_score(scores['before'])}</td>"
        f"<td>{format_score(scores['after'])}</td>{_change_cell(scores)}</tr>"
        for name in run.rewards
        if (scores := run.heldout.get(name))
    )
    return _section(
        "Held-out prompts",
        "Mean scores on prompts that were never trained on, drawn from the same noise before and "
        "after. A reward that is not trained on shows whether the pictures became better, or only "
        "the scores.",
        '<div class="sheet"><table><thead><tr><th>reward</th><th>before</th>'
        f"<th>{after}</th><th>change</th></tr></thead><tbody>{rows}</tbody></table></div>",
    )


def _reward_name(run: RunFolder, name: str) -> str:
    tag = "" if name in run.trained_rewards else '<span class="tag">not trained on</span>'
    return escape(name) + tag


def _change_cell(scores: Mapping[str, float | None]) -> str:
    before, after = scores.get("before"), scores.get("after")
    return f'<td class="{_way(before, after)}">{format_change(before, after)}</td>'


def _score_cell(scores: list[float | None]) -> str:
    """Scores of one prompt, before and after; only one where there is one evaluation."""
    text = " → ".join(NOTHING if score is None else f"{score:.3f}" for score in scores)
    return f'<td class="{_way(scores[0], scores[-1])}">{text}</td>'


def _way(before: float | None, after: float | None) -> str:
    if before is None or after is None or before == after:
        return "same"
    return "up" if after > before else "down"


def _pictures(run: RunFolder) -> str:
    if not run.pictures:
        return ""
    first, last = run.pictures[0], run.pictures[-1]
    shown = [first] if first is last else [first, last]
    places = dict.fromkeys(place for pictures in shown for place in pictures.by_place())
    cards = "".join(_prompt_card(run, shown, place) for place in places)
    return _section(
        "Pictures of held-out prompts",
        "Evenly spaced over the held-out prompts, not a selection. Both pictures of a prompt start "
        "from the same noise.",
        f'<div class="prompts">{cards}</div>',
    )


def _prompt_card(run: RunFolder, shown: list[HeldoutPictures], place: tuple[str, str]) -> str:
    entries = [pictures.by_place().get(place) for pictures in shown]
    prompt = next(entry["prompt"] for entry in entries if entry)
    pair = "".join(
        f"<div><span>{_when(pictures.iteration)}</span>{_image(pictures.folder, entry)}</div>"
        for pictures, entry in zip(shown, entries, strict=True)
    )
    scores = [entry["scores"] if entry else {} for entry in entries]
    names = sorted(
        {name for one in scores for name in one},
        key=lambda name: (name not in run.trained_rewards, name),
    )
    rows = "".join(
        f"<tr><th>{_reward_name(run, name)}</th>"
        + _score_cell([one.get(name) for one in scores])
        + "</tr>"
        for name in names
    )
    return (
        f'<article class="prompt"><h3>{escape(prompt)}</h3><div class="pair">{pair}</div>'
        f"<table><tbody>{rows}</tbody></table></article>"
    )


def _when(iteration: int) -> str:
    return "before training" if iteration == 0 else f"after iteration {iteration}"


def _image(folder: Path, entry: Mapping[str, Any] | None) -> str:
    """An embedded picture, or a box that says why there is none."""
    if entry is None:
        return '<div class="absent">not drawn</div>'
    path = (folder / entry["file"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        return '<div class="absent">lies outside the run folder</div>'
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except FileNotFoundError:
        return f'<div class="absent">{escape(path.name)} is missing</div>'
    except (OSError, SyntaxError) as error:  # Pillow's ways to say that a file is broken
        return f'<div class="absent">{escape(path.name)} cannot be read: {escape(str(error))}</div>'
    small = ' class="small"' if max(picture.size) < PIXELATED_BELOW else ""
    alt = escape(entry["prompt"], quote=True)
    return f'<img{small} src="{_data_url(picture)}" alt="{alt}">'


def _data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    if max(picture.size) > LARGEST_SIDE:
        picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
        picture.save(file, "JPEG", quality=88)
        kind = "jpeg"
    else:
        picture.save(file, "PNG", optimize=True)
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _rewards(run: RunFolder) -> str:
    charts = [
        line_chart(
            name if name in run.trained_rewards else f"{name} (not trained on)",
            [
                Series("mean of an iteration", PALE_BLUE, run.points(f"reward/{name}/mean")),
                Series("held-out prompts", BLUE, run.points(f"heldout/{name}"), dots=True),
            ],
        )
        for name in run.rewards
    ]
    return _section(
        "Rewards",
        "An iteration's mean is over its own prompts, pictures with injected noise and coarser "
        "grids included, so it moves more than the held-out mean, and lies elsewhere.",
        _charts(charts),
    )


def _policy(run: RunFolder) -> str:
    colours = dict(zip(run.rewards, (BLUE, ORANGE, GREEN, PURPLE, RED), strict=False))
    charts = [
        line_chart(
            "Advantages",
            [
                _series(run, "mean |advantage|", BLUE, "advantage/abs_mean"),
                _series(run, "share clamped", ORANGE, "advantage/clamped_share"),
            ],
            from_zero=True,
        ),
        line_chart(
            "Share of groups whose scores do not differ",
            [
                _series(run, name, colour, f"reward/{name}/constant_share")
                for name, colour in colours.items()
            ],
            from_zero=True,
        ),
        line_chart(
            "Largest |Δlog p|",
            [
                _series(run, "all updates", BLUE, "policy/max_abs_log_ratio"),
                _series(run, "before the first", RED, "policy/first_max_abs_log_ratio"),
            ],
            from_zero=True,
        ),
        line_chart(
            "Share of branches clipped",
            [
                _series(run, "above", BLUE, "policy/clip_fraction_high"),
                _series(run, "below", ORANGE, "policy/clip_fraction_low"),
            ],
            from_zero=True,
        ),
        line_chart(
            "Gradient norm, before it is limited",
            [_series(run, "mean of an iteration's updates", BLUE, "policy/grad_norm")],
            from_zero=True,
        ),
        line_chart(
            "Approximate KL of an iteration, nat",
            [_series(run, "KL(old || new)", BLUE, "policy/approx_kl")],
        ),
    ]
    dropped = int(run.total("groups/dropped"))
    return _section(
        "Advantages and policy",
        "|Δlog p| before the first update must be 0 up to rounding: rollout and learner then "
        "compute the same. Groups dropped for an invalid score in the whole run: "
        f"{dropped}.",
        _charts(charts),
    )


def _series(run: RunFolder, label: str, colour: str, metric: str) -> Series:
    return Series(label, colour, run.points(metric))


def _time(run: RunFolder) -> str:
    iterations = sorted({record["iteration"] for record in run.records})
    spent = {role: _by_iteration(run, f"time/{role}_s", iterations) for role in ROLES}
    whole = _by_iteration(run, "time/iteration_s", iterations)
    named = [sum(column) for column in zip(*spent.values(), strict=True)]
    spent["other"] = [max(0.0, all_ - some) for all_, some in zip(whole, named, strict=True)]
    colours = ROLES | {"other": GREY}
    layers = [
        Series(role, colours[role], list(zip(iterations, seconds, strict=True)))
        for role, seconds in spent.items()
    ]
    total = sum(map(sum, spent.values()))
    if not total:
        return _section("Time", "No times were recorded.", "")
    rows = "".join(
        f"<tr><th>{role}</th><td>{format_seconds(sum(seconds))}</td>"
        f"<td>{sum(seconds) / total:.1%}</td></tr>"
        for role, seconds in spent.items()
        if any(seconds)
    )
    table = (
        '<div class="sheet"><table><thead><tr><th>role</th><th>time</th><th>share</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    rate = run.total("rollout/evaluations") / max(run.total("time/generate_s"), 1e-9)
    return _section(
        "Time",
        f"What the driver waited for. Rollout: {rate:.1f} evaluations of the model a second.",
        _charts([stacked_bars("Seconds of an iteration, by role", layers), table]),
    )


def _by_iteration(run: RunFolder, name: str, iterations: Iterable[int]) -> list[float]:
    """Sum of a metric at every iteration: training and evaluation are separate records."""
    sums = dict.fromkeys(iterations, 0.0)
    for iteration, value in run.points(name):
        sums[int(iteration)] += value or 0.0
    return list(sums.values())


def _how(run: RunFolder) -> str:
    rows = {name.capitalize(): text for name, text in _arithmetic(run.config).items()}
    if "weights_checksum" in run.summary:
        rows["Checksum of the final weights"] = str(run.summary["weights_checksum"])
    versions = run.summary.get("versions", {})
    if versions:
        rows["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    body = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items()
    )
    settings = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    details = (
        "<details><summary>All settings (config.yaml)</summary>"
        f"<pre>{escape(settings)}</pre></details>"
    )
    return _section(
        "What was run",
        "",
        (f'<div class="sheet words"><table><tbody>{body}</tbody></table></div>' if body else "")
        + (details if run.config else ""),
    )


def _arithmetic(settings: dict[str, Any]) -> dict[str, str]:
    """What an iteration makes, in numbers; nothing where the settings are another version's."""
    try:
        return arithmetic(config_from_dict(settings, "config.yaml"))
    except ConfigError:
        # Written by another version, or by hand: the settings below still say what was run.
        return {}


def _section(title: str, lead: str, content: str) -> str:
    lead = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{content}</section>"


def _charts(charts: list[str]) -> str:
    columns = " three" if len(charts) == 3 else ""
    return f'<div class="charts{columns}">{"".join(charts)}</div>'
