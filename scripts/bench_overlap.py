"""``pipeline: one_step_off`` against ``sync`` on the tiny model: time and rewards.

    python scripts/bench_overlap.py --iterations 30 --seeds 0 1 2 --json overlap.json

One rollout worker and one learner rank, a core each, and a recipe in which both take about as long
(Flow-GRPO: each member has its own trajectory, which the learner has to walk, too). Runs of the two
pipelines alternate, so that a busy machine slows both down alike.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import measuring
import program
from g2rpo_ray.config import save_config
from g2rpo_ray.tracking.metrics import read_metrics

PIPELINES = ("sync", "one_step_off")
REWARDS = ("clip", "oracle")
WARM_UP = 3
"""First iterations that are left out of the times."""


def train(folder: Path, pipeline: str, seed: int, iterations: int) -> Path:
    """A run of its own process; gives its folder."""
    run_dir = folder / f"{pipeline}_{seed}"
    config = measuring.run_config(
        [
            *measuring.settings("overlap"),
            f"run_dir={run_dir}",
            f"pipeline={pipeline}",
            f"seed={seed}",
            f"iterations={iterations}",
        ],
        REWARDS,
    )
    settings = folder / f"{run_dir.name}.yaml"
    save_config(config, settings)
    with (folder / f"{run_dir.name}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "g2rpo_ray.cli", "train", str(settings)],
            check=True,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return run_dir


def measure(run_dir: Path) -> dict[str, Any]:
    """Medians over the iterations, and the held-out reward before and after."""
    # In the last iteration nothing is left to be drawn ahead.
    records = [r for r in read_metrics(run_dir) if r["kind"] == "train"][WARM_UP:-1]
    names = ("time/iteration_s", "time/generate_s", "time/learn_s", "idle/rollout", "idle/learner")
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        **{name: round(median(r[name] for r in records), 3) for name in names},
        "staleness": max(r["rollout/staleness"] for r in records),
        "reward": summary["heldout"]["clip"]["after"],
        "reward_before": summary["heldout"]["clip"]["before"],
    }


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="g2rpo-overlap-")).resolve()
    found: dict[str, list[dict[str, Any]]] = {pipeline: [] for pipeline in PIPELINES}
    for seed in options.seeds:
        for pipeline in PIPELINES:
            run_dir = train(folder, pipeline, seed, options.iterations)
            found[pipeline].append(measure(run_dir))
            print(pipeline, seed, found[pipeline][-1])
    ratios = [
        a["time/iteration_s"] / b["time/iteration_s"]
        for a, b in zip(*(found[pipeline] for pipeline in PIPELINES), strict=True)
    ]
    rewards = {name: [run["reward"] for run in runs] for name, runs in found.items()}
    result = {
        "throughput_ratio": round(median(ratios), 2),
        "throughput_ratios": [round(ratio, 2) for ratio in ratios],
        "reward": {
            name: {
                "mean": round(fmean(values), 4),
                "spread": round(stdev(values), 4) if len(values) > 1 else None,
            }
            for name, values in rewards.items()
        },
        "runs": found,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "runs"}, indent=1))
    measuring.write_json(options.json, result)


if __name__ == "__main__":
    program.run(main)
