"""What the roles answer becomes the metrics of an iteration."""

import math
from typing import Any

from g2rpo_ray.rollout.worker import RolloutSummary
from g2rpo_ray.tracking.collect import rollout_metrics
from g2rpo_ray.tracking.table import known_name


def summary(*measured: dict[str, dict[str, float]]) -> RolloutSummary:
    by_reward: dict[str, Any] = {"hps": 0.5}
    return RolloutSummary(
        group_id=0, weight_version=0, evaluations=10, pictures=4, seconds={}, failures=[],
        reward_mean=by_reward, reward_spread=by_reward, constant_share=by_reward,
        peak_gib=0.0, warnings=[], measured=list(measured),
    )  # fmt: skip


def test_cost_and_failures_of_a_reward_come_from_every_request() -> None:
    values = rollout_metrics(
        [
            summary({"hps": {"latency_s": 1.0, "batch_fill": 0.5, "failures": 1}}),
            summary(
                {"hps": {"latency_s": 3.0, "batch_fill": 1.0, "failures": 0}},
                {"hps": {"failures": 3}},
            ),
        ],
        generate_s=2.0,
    )
    assert values["reward/hps/latency_s"] == 2.0
    assert values["reward/hps/batch_fill"] == 0.75
    assert values["reward/hps/failures"] == 4
    assert all(known_name(name) for name in values)


def test_where_nothing_was_scored_there_is_no_number() -> None:
    values = rollout_metrics([summary({"hps": {"failures": 3}})], generate_s=2.0)
    assert math.isnan(values["reward/hps/latency_s"])
    assert values["reward/hps/failures"] == 3
