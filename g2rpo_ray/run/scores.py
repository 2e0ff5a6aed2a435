"""What a run scored on held-out prompts: which checkpoint is the best, whether it still learns."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from PIL import Image

from g2rpo_ray.common.files import replace_text, replacing, writing
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.folders import iteration_of, list_checkpoints
from g2rpo_ray.rollout.answers import HeldoutPictures
from g2rpo_ray.run.paths import run_folder
from g2rpo_ray.tracking.metrics import read_metrics

logger = logging.getLogger(__name__)


def evaluated_iterations(config: Config) -> set[int]:
    """Iterations whose evaluation is recorded."""
    return {record["iteration"] for record in read_metrics(run_folder(config), "evaluation")}


def heldout_means(config: Config, reward: str | None) -> dict[int, float]:
    """Held-out mean of a reward by evaluated iteration, in their order; those without a number are
    left out."""
    name = f"heldout/{reward}"
    records = read_metrics(run_folder(config), "evaluation")
    means = {r["iteration"]: r[name] for r in records if name in r}
    return {n: means[n] for n in sorted(means) if means[n] is not None}


def best_evaluated(config: Config) -> int | None:
    """Iteration with the highest held-out mean, of the checkpoints that are there and the base
    model (0); of equal ones the last."""
    there = [0, *map(iteration_of, list_checkpoints(run_folder(config)))]
    means = heldout_means(config, config.checkpoint.best)
    means = {n: mean for n, mean in means.items() if n in there}
    return max(means, key=lambda n: (means[n], n), default=None)


def is_stalled(config: Config) -> bool:
    """Whether none of the last ``evaluation.patience`` evaluations is better than all before."""
    means = list(heldout_means(config, config.checkpoint.best).values())
    settings = config.evaluation
    patience = settings.patience
    if patience == 0 or len(means) <= patience:
        return False
    return max(means[-patience:]) <= max(means[:-patience]) + settings.min_gain


def fallen_rewards(config: Config) -> dict[str, float]:
    """Rewards whose last held-out mean lies too far below the first for ``evaluation.guards``, and
    how far."""
    fallen = {}
    for name, guard in config.evaluation.guards.items():
        means = list(heldout_means(config, name).values())
        if means and means[0] - means[-1] > guard.max_drop:
            fallen[name] = means[0] - means[-1]
    return fallen


def lowered_scales(config: Config, scales: Mapping[str, float], iteration: int) -> dict[str, float]:
    """What the weights of trained rewards are multiplied by after the evaluation of an iteration,
    from what they were before it (1 where not named)."""
    guards = {n: g for n, g in config.evaluation.guards.items() if g.then == "lower_weight"}
    gains = {}
    for name in config.rewards if guards else ():
        if iteration in (means := heldout_means(config, name)):
            gains[name] = means[iteration] - next(iter(means.values()))
    lowered = dict(scales)
    for name, guard in guards.items():
        if -gains.get(name, 0.0) <= guard.max_drop:
            continue
        for other in config.trained_rewards:
            if gains.get(other, 0.0) > 0:
                scale = lowered.get(other, 1.0)
                lowered[other] = min(scale, max(guard.floor, scale * guard.factor))
    return lowered


def stopping_guard(config: Config) -> str | None:
    """A reward whose guard ends the run."""
    guards = config.evaluation.guards
    return next((name for name in fallen_rewards(config) if guards[name].then == "stop"), None)


def fallen_most(
    folder: Path, reward: str, results: Sequence[HeldoutPictures], count: int
) -> dict[int, float]:
    """Prompts whose score fell most since the first evaluation, and how far, the most first; of
    those whose pictures were kept there."""
    files = list((folder / "pictures" / "heldout").glob("iteration_*.json"))
    if not files:
        return {}
    first = min(files, key=lambda file: int(file.stem.removeprefix("iteration_")))
    before: dict[int, list[float]] = {}
    try:
        for entry in json.loads(first.read_text(encoding="utf-8")):
            if (score := entry["scores"].get(reward)) is not None:
                before.setdefault(entry["prompt_id"], []).append(score)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # No reason to end a run, which has other evaluations.
        logger.warning("%s: not readable as a list of pictures (%r); remove it", first, error)
        return {}
    falls = {
        result.prompt_id: fmean(before[result.prompt_id]) - float(result.scores[reward].mean())
        for result in results
        if result.prompt_id in before
    }
    fallen = sorted((n for n in falls if falls[n] > 0), key=lambda n: -falls[n])
    return {number: falls[number] for number in fallen[:count]}


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
