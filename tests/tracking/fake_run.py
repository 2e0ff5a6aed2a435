"""A run folder as a driver leaves it, with numbers and pictures made up from a seed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

from g2rpo_ray.config.operation import TrackingSection
from g2rpo_ray.tracking.metrics import MetricsLog

PROMPTS = [
    "a red circle left of a blue square",
    "a green triangle above a yellow circle",
    "a purple square below an orange triangle",
    "a blue diamond right of a red square",
    "a yellow triangle above a green diamond",
    "an orange circle left of a purple diamond",
]

COLOURS = {"red", "blue", "green", "yellow", "purple", "orange"}

CONFIG: dict[str, Any] = {
    "run_dir": "runs/quickstart",
    "seed": 3,
    "iterations": 40,
    "algorithm": "g2rpo",
    "model": {"path": "tiny_world:flux", "dtype": "float32"},
    "prompts": {"train": "train.txt", "heldout": "heldout.txt"},
    "sampling": {
        "height": 64, "width": 64, "steps": 6, "shift": 3.0, "guidance": 3.5, "sde": "flow",
        "eta": 0.7, "members": 8, "prompts_per_iteration": 4,
    },
    "g2rpo": {"sde_steps": [0, 1, 2], "granularities": [1, 2]},
    "rewards": {
        "clip": {
            "kind": "clip", "weight": 1.0, "options": {"architecture": "local-dir:tiny_world:clip"}
        },
        "hps": {"kind": "hps", "weight": 1.0, "options": {"checkpoint": "HPS_tiny.pt"}},
        "oracle": {"kind": "oracle", "weight": 0.0},
    },
    "learner": {"update": "per_iteration", "learning_rate": 1e-4, "clip": 1e-4},
}  # fmt: skip

HELDOUT = {"clip": (0.885, 0.963), "hps": (0.579, 0.688), "oracle": (0.545, 0.81)}


def make_run(run_dir: Path, *, iterations: int = 40, prompts: list[str] = PROMPTS) -> Path:
    """A finished run: configuration, metrics, pictures before and after, summary."""
    run_dir.mkdir(parents=True)
    config = CONFIG | {"iterations": iterations}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rng = np.random.default_rng(0)
    with MetricsLog(run_dir, TrackingSection(tensorboard=False), config) as log:
        log.record(0, _evaluation(0.0, rng))
        for iteration in range(1, iterations + 1):
            log.record(iteration, train_values(iteration / iterations, rng))
            if iteration % 10 == 0 or iteration == iterations:
                log.record(iteration, _evaluation(iteration / iterations, rng))
    for iteration in (0, iterations):
        add_pictures(run_dir, iteration, prompts, blur=iteration == 0)
    summary = {
        "iterations": iterations,
        "train_s": 163.2,
        "evaluations": 39_840,
        "peak_rss_gib": 6.31,
        "weights_checksum": "9f2c51d07be8a344",
        "heldout": {name: {"before": b, "after": a} for name, (b, a) in HELDOUT.items()},
        "trained_rewards": ["clip", "hps"],
        "algorithm": "g2rpo",
        "seed": 3,
        "versions": {"g2rpo-ray": "0.1.0", "torch": "2.14.1", "ray": "2.60.0"},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def train_values(share: float, rng: np.random.Generator) -> dict[str, float]:
    """Every training metric of one iteration; ``share`` of the run is done."""
    noise = rng.normal(size=8)
    values: dict[str, float] = {"weight_version": round(share * 100)}
    for name, (before, after) in list(HELDOUT.items())[:2]:
        mean = before + (after - before) * share - 0.05
        values[f"reward/{name}/mean"] = mean + 0.02 * float(rng.normal())
        values[f"reward/{name}/spread"] = 0.08 + 0.01 * float(rng.normal())
        values[f"reward/{name}/constant_share"] = max(0.0, 0.05 * float(rng.normal()))
    return values | {
        "advantage/abs_mean": 1.6 + 0.1 * noise[0],
        "advantage/clamped_share": abs(0.01 * noise[1]),
        "groups/trained": 12,
        "groups/dropped": 0,
        "policy/loss": 0.001 * noise[2],
        "policy/ratio_mean": 1.0,
        "policy/first_max_abs_log_ratio": 0.0,
        "policy/max_abs_log_ratio": abs(2e-4 + 1e-4 * noise[3]),
        "policy/approx_kl": abs(1e-8 * noise[4]),
        "policy/clip_fraction_low": abs(0.1 * noise[5]),
        "policy/clip_fraction_high": abs(0.1 * noise[6]),
        "policy/grad_norm": 0.6 + 0.1 * abs(noise[7]),
        "policy/learning_rate": 1e-4,
        "policy/updates": 1,
        "time/generate_s": 2.4 + 0.2 * abs(noise[0]),
        "time/learn_s": 1.1 + 0.1 * abs(noise[1]),
        "time/sync_s": 0.09,
        "time/checkpoint_s": 0.4 if round(share * 40) % 10 == 0 else 0.0,
        "time/iteration_s": 4.1 + 0.2 * abs(noise[0]) + 0.1 * abs(noise[1]),
        "rollout/denoise_s": 3.4,
        "rollout/decode_s": 0.7,
        "rollout/score_s": 0.5,
        "rollout/evaluations": 996,
        "rollout/pictures": 192,
        "rollout/evaluations_per_s": 996 / 2.5,
        "sync/bytes": 7_440_000,
        "sync/tensors": 94,
        "memory/pss_gib": 6.1,
    }


def add_pictures(run_dir: Path, iteration: int, prompts: list[str], *, blur: bool) -> None:
    """One 64x64 picture a prompt, and the list that names them."""
    folder = run_dir / "pictures" / "heldout"
    (folder / f"iteration_{iteration}").mkdir(parents=True)
    entries = []
    for prompt_id, prompt in enumerate(prompts):
        file = f"iteration_{iteration}/{prompt_id}_0.png"
        _draw(prompt, blur).save(folder / file)
        scores = {
            "clip": 0.88 if blur else 0.95,
            "hps": 0.58 if blur else 0.69 - 0.03 * prompt_id,
            "oracle": 0.25 if blur else 1.0,
        }
        entries.append({"prompt_id": prompt_id, "prompt": prompt, "file": file, "scores": scores})
    (folder / f"iteration_{iteration}.json").write_text(json.dumps(entries))


def _evaluation(share: float, rng: np.random.Generator) -> dict[str, float]:
    values = {
        f"heldout/{name}": before + (after - before) * share + 0.01 * float(rng.normal())
        for name, (before, after) in HELDOUT.items()
    }
    return values | {"time/evaluate_s": 3.2}


def _draw(prompt: str, blur: bool) -> Image.Image:
    colours = [word for word in prompt.split() if word in COLOURS]
    picture = Image.new("RGB", (64, 64), "#f0ece4")
    draw = ImageDraw.Draw(picture)
    for index, colour in enumerate(colours):
        box = (8 + 28 * index, 20, 28 + 28 * index, 40)
        (draw.ellipse if index == 0 else draw.rectangle)(box, fill=colour)
    return picture.resize((16, 16)).resize((64, 64)) if blur else picture
