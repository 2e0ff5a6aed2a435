"""What a run scored on held-out prompts: which checkpoint is the best, whether it still learns."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from g2rpo_ray.common.files import replace_text, replacing, writing
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.folders import iteration_of, list_checkpoints
from g2rpo_ray.rollout.answers import HeldoutPictures
from g2rpo_ray.run.paths import run_folder
from g2rpo_ray.tracking.metrics import read_metrics


def evaluated_iterations(config: Config) -> set[int]:
    """Iterations whose evaluation is recorded."""
    return {record["iteration"] for record in read_metrics(run_folder(config), "evaluation")}


def heldout_means(config: Config) -> dict[int, float]:
    """Held-out mean of ``checkpoint.best`` by evaluated iteration, in their order; those without a
    number are left out."""
    name = f"heldout/{config.checkpoint.best}"
    records = read_metrics(run_folder(config), "evaluation")
    means = {r["iteration"]: r[name] for r in records if name in r}
    return {n: means[n] for n in sorted(means) if means[n] is not None}


def best_evaluated(config: Config) -> int | None:
    """Iteration with the highest held-out mean, of the checkpoints that are there and the base
    model (0); of equal ones the last."""
    there = [0, *map(iteration_of, list_checkpoints(run_folder(config)))]
    means = {n: mean for n, mean in heldout_means(config).items() if n in there}
    return max(means, key=lambda n: (means[n], n), default=None)


def is_stalled(config: Config) -> bool:
    """Whether none of the last ``evaluation.patience`` evaluations is better than all before."""
    means, settings = list(heldout_means(config).values()), config.evaluation
    patience = settings.patience
    if patience == 0 or len(means) <= patience:
        return False
    return max(means[-patience:]) <= max(means[:-patience]) + settings.min_gain


def save_heldout(folder: Path, iteration: int, results: Sequence[HeldoutPictures]) -> None:
    """Keep pictures with their scores: ``pictures/heldout/iteration_<n>.json`` and PNG files."""
    target = folder / "pictures" / "heldout"
    name = f"iteration_{iteration}"
    with writing(target):
        (target / name).mkdir(parents=True, exist_ok=True)
    entries = []
    for result in results:
        for number, picture in enumerate(result.pictures):
            file = f"{name}/{result.prompt_id}_{number}.png"
            with replacing(target / file) as temporary:
                Image.fromarray(picture.numpy()).save(temporary, "PNG")
            scores = {reward: float(values[number]) for reward, values in result.scores.items()}
            entries.append(
                {"prompt_id": result.prompt_id, "prompt": result.prompt, "file": file,
                 "scores": {n: None if math.isnan(s) else s for n, s in scores.items()}}
            )  # fmt: skip
    replace_text(target / f"{name}.json", json.dumps(entries, indent=1, ensure_ascii=False))


def heldout_before_after(
    folder: Path, iteration: int | None = None
) -> dict[str, dict[str, float | None]]:
    """Of each reward: the first evaluation, and that of an iteration (the last); None without one.

    Empty where neither was made.
    """
    records, prefix = read_metrics(folder), "heldout/"
    evaluations = {r["iteration"]: r for r in records if r["kind"] == "evaluation"}
    last = max((r["iteration"] for r in records), default=0) if iteration is None else iteration
    first = min(evaluations, default=last)
    before, after = evaluations.get(first, {}), evaluations.get(last, {})
    if first == last:
        before = {}
    return {
        name.removeprefix(prefix): {"before": before.get(name), "after": after.get(name)}
        for name in before | after
        if name.startswith(prefix)
    }
