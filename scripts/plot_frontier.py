"""The frontier of accelerated completions: seconds of a prompt against agreement with exact ones.

    python scripts/plot_frontier.py --accuracy tiny.json hard.json --seconds rollout.json \
        --plot docs/images/frontier.svg

Agreement is that of ``bench_accelerations.py``, a curve for each file. Seconds are those that
``bench_rollout.py`` measured on one worker, or, drawn hollow, what ``g2rpo plan`` predicts of the
same settings on ``--card``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import program
from bench_rollout import VARIANTS
from g2rpo_ray.config import load_config
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.plan.prediction import Predictor

RECIPE = measuring.ROOT / "configs" / "flux_g2rpo_hps_clip.yaml"


@dataclass
class Accuracy:
    """What ``bench_accelerations.py`` found."""

    variants: dict[str, dict[str, float]]


@dataclass
class Measured:
    """What ``bench_rollout.py`` found."""

    engine: dict[str, dict[str, Any]]


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--accuracy", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--seconds", type=Path, metavar="FILE", help="measured ones")
    parser.add_argument("--card", default="H200", help="whose seconds are predicted (H200)")
    parser.add_argument("--plot", type=program.output, required=True, help="the SVG to write")
    options = parser.parse_args()
    worlds = {path.stem: measuring.read_json(path, Accuracy).variants for path in options.accuracy}
    measured = {}
    if options.seconds:
        measured = measuring.read_json(options.seconds, Measured).engine
    seconds = {}
    for name in ["exact", *dict.fromkeys(name for found in worlds.values() for name in found)]:
        if found := measured.get(f"{name}, 1"):
            seconds[name] = found["engine_s_per_prompt"]
        elif name in VARIANTS:
            seconds[name] = planned_s(name, options.card)
        else:
            continue  # a frozen base in 8 bits is no acceleration
        print(f"{name}: {seconds[name]:.1f} s, {'measured' if found else 'planned'}")
    draw(worlds, seconds, {n for n in seconds if f"{n}, 1" in measured}, options.plot)


def planned_s(variant: str, card: str) -> float:
    """Of one whole prompt of the paper's recipe."""
    settings = [f"rollout.{key}={json.dumps(value)}" for key, value in VARIANTS[variant].items()]
    settings += ["run_dir=unused", "sampling.prompts_per_iteration=1", "rollout.batch_size=8"]
    settings += ["rollout.decode_batch_size=4"]
    return Predictor(load_config(RECIPE, settings), load_costs(), card).generate_s(1)


def draw(
    worlds: dict[str, dict[str, dict[str, float]]],
    seconds: dict[str, float],
    measured: set[str],
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for number, (world, variants) in enumerate(worlds.items()):
        points = {"exact": {"rank_correlation": 1.0}} | variants
        for name, found in points.items():
            if name not in seconds:
                continue
            place = (seconds[name], found["rank_correlation"])
            colour = f"C{number}"
            filled = colour if name in measured else "none"
            axes.plot(*place, "o", color=colour, markerfacecolor=filled)
            axes.annotate(name, place, (4, 3), textcoords="offset points", fontsize=7)
        axes.plot([], [], "o", color=f"C{number}", label=world)
    axes.set(xlabel="seconds a prompt", ylabel="rank correlation with exact advantages, in groups")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    program.run(main)
