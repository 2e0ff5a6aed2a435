"""From what the roles answer to the metrics of one iteration."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from g2rpo_ray.learner.group_training import StepRecord
from g2rpo_ray.learner.update import UpdateReport
from g2rpo_ray.rollout.answers import HeldoutPictures, RewardSummary, RolloutSummary


def rollout_metrics(
    summaries: Sequence[RolloutSummary], generate_s: float, tflop_per_evaluation: float
) -> dict[str, float]:
    """Rewards and cost of one iteration's rollout."""
    values: dict[str, float] = {}
    for name in summaries[0].rewards:
        values |= _reward_metrics(name, [summary.rewards[name] for summary in summaries])
        requests = [request[name] for s in summaries for request in s.measured if name in request]
        if requests:
            values |= _scoring_metrics(name, requests)
    for phase in ("denoise_s", "decode_s", "score_s"):
        values[f"rollout/{phase}"] = sum(s.seconds.get(phase, 0.0) for s in summaries)
    evaluations = sum(s.evaluations for s in summaries)
    return values | {
        "weight_version": summaries[0].weight_version,
        "rollout/evaluations": evaluations,
        "rollout/pictures": sum(s.pictures for s in summaries),
        "rollout/evaluations_per_s": evaluations / generate_s,
        # How fast a worker computes while it is in the transformer; NaN where it never was.
        "rollout/tflop_per_s": _share(
            tflop_per_evaluation * evaluations, values["rollout/denoise_s"]
        ),
    }


def _reward_metrics(name: str, rewards: Sequence[RewardSummary]) -> dict[str, float]:
    scores, groups = sum(r.scores for r in rewards), sum(r.groups for r in rewards)
    return {
        f"reward/{name}/mean": _share(sum(r.score_sum for r in rewards), scores),
        f"reward/{name}/spread": _share(sum(r.spread_sum for r in rewards), groups),
        f"reward/{name}/constant_share": _share(sum(r.constant_groups for r in rewards), groups),
    }


def _share(total: float, count: float) -> float:
    return total / count if count else math.nan


def _scoring_metrics(name: str, requests: list[dict[str, float]]) -> dict[str, float]:
    # A request without an answer has neither time nor passes.
    answered = [request for request in requests if "latency_s" in request]
    means = {
        f"reward/{name}/{key}": fmean(r[key] for r in answered) if answered else math.nan
        for key in ("latency_s", "batch_fill")
    }
    sums = {key: sum(r.get(key, 0.0) for r in requests) for key in ("failures", "wait_s")}
    return means | {f"reward/{name}/{key}": value for key, value in sums.items()}


def update_metrics(update: UpdateReport) -> dict[str, float]:
    """Health of one iteration's update; means over the groups that were not dropped."""
    trained = [record for record in update.records if record.valid]
    taught = _groups(trained)
    values: dict[str, float] = {
        "groups/trained": len(taught),
        "groups/dropped": len(_groups(update.records) - taught),
        "groups/masked_members": sum(record.masked_members for record in trained),
        "policy/grad_norm": fmean(update.grad_norms),
        "policy/learning_rate": update.learning_rate,
        "policy/updates": len(update.grad_norms),
    }
    if trained:
        values |= {
            "advantage/abs_mean": fmean(r.advantage_abs_mean for r in trained),
            "advantage/clamped_share": fmean(r.advantage_clamped_share for r in trained),
            "policy/loss": fmean(r.loss for r in trained),
            "policy/max_abs_log_ratio": _largest_log_ratio(trained),
            "policy/ratio_mean": fmean(r.health.ratio_mean for r in trained),
            "policy/approx_kl": fmean(r.health.approx_kl for r in trained),
            "policy/kl_to_reference": fmean(r.kl_to_reference for r in trained),
            "policy/clip_fraction_low": fmean(r.health.clip_fraction_low for r in trained),
            "policy/clip_fraction_high": fmean(r.health.clip_fraction_high for r in trained),
        }
    if first := [record for record in trained if record.update == 0]:
        values["policy/first_max_abs_log_ratio"] = _largest_log_ratio(first)
    return values


def _groups(records: Sequence[StepRecord]) -> set[tuple[int, int]]:
    """Each once, in however many updates it is."""
    return {(record.group_id, record.position) for record in records}


def _largest_log_ratio(records: Sequence[StepRecord]) -> float:
    # NumPy's maximum is NaN where one is; Python's depends on the order.
    return float(np.max([record.health.max_abs_log_ratio for record in records]))


def heldout_metrics(results: Sequence[HeldoutPictures]) -> dict[str, float]:
    """Mean of each reward over all held-out pictures; NaN where one has no score."""
    return {
        f"heldout/{name}": fmean(float(score) for r in results for score in r.scores[name])
        for name in results[0].scores
    }
