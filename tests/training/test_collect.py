"""What the roles answer becomes the metrics of an iteration."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from g2rpo_ray.learner.group_training import StepRecord
from g2rpo_ray.learner.update import UpdateReport
from g2rpo_ray.maths.objective import PolicyHealth
from g2rpo_ray.rollout.answers import RolloutSummary, summarise
from g2rpo_ray.tracking.names import known_name
from g2rpo_ray.training import collect
from g2rpo_ray.training.collect import update_metrics

NAN = math.nan


def rollout_metrics(drawn: list[RolloutSummary], generate_s: float) -> dict[str, float]:
    return collect.rollout_metrics(drawn, generate_s, tflop_per_evaluation=0.5)


def summary(
    *measured: dict[str, dict[str, float]], scores: Sequence[Sequence[float]] = ((0.5, 0.5),)
) -> RolloutSummary:
    """Args:
    scores: of reward hps, by step and member.
    """
    return RolloutSummary(
        group_id=0, weight_version=0, evaluations=10, pictures=4, seconds={}, failures=[],
        rewards={"hps": summarise(torch.tensor([scores]), min_spread=1e-6)},
        peak_gib=0.0, warnings=[], measured=list(measured),
    )  # fmt: skip


def test_cost_and_failures_of_a_reward_come_from_every_request() -> None:
    values = rollout_metrics(
        [
            summary({"hps": {"latency_s": 1.0, "batch_fill": 0.5, "failures": 1, "wait_s": 2.5}}),
            summary(
                {"hps": {"latency_s": 3.0, "batch_fill": 1.0, "failures": 0, "wait_s": 0.5}},
                {"hps": {"failures": 3}},
            ),
        ],
        generate_s=2.0,
    )
    assert values["reward/hps/latency_s"] == 2.0
    assert values["reward/hps/batch_fill"] == 0.75
    assert values["reward/hps/failures"] == 4
    assert values["reward/hps/wait_s"] == 3.0
    assert all(known_name(name) for name in values)


def test_where_nothing_was_scored_there_is_no_number() -> None:
    values = rollout_metrics([summary({"hps": {"failures": 3}})], generate_s=2.0)
    assert math.isnan(values["reward/hps/latency_s"])
    assert values["reward/hps/failures"] == 3


def test_means_are_over_the_scores_that_there_are() -> None:
    drawn = [
        # Two scores, three scores and none; one constant group, one that varies.
        summary(scores=[[1.0, 1.0], [NAN, NAN]]),
        summary(scores=[[2.0, 4.0], [NAN, 6.0]]),
        summary(scores=[[NAN, NAN], [NAN, NAN]]),
    ]
    values = rollout_metrics(drawn, generate_s=1.0)
    assert values["reward/hps/mean"] == pytest.approx(14 / 5)
    assert values["reward/hps/spread"] == pytest.approx(math.sqrt(2) / 2)
    assert values["reward/hps/constant_share"] == 0.5


def test_a_group_without_a_score_is_neither_constant_nor_varying() -> None:
    drawn = [summary(scores=[[0.5, 0.5]]), summary(scores=[[NAN, NAN]])]
    assert rollout_metrics(drawn, generate_s=1.0)["reward/hps/constant_share"] == 1.0


def test_without_any_score_the_means_are_no_numbers() -> None:
    values = rollout_metrics([summary(scores=[[NAN, NAN]])], generate_s=1.0)
    for name in ("mean", "spread", "constant_share"):
        assert math.isnan(values[f"reward/hps/{name}"])


def record(max_abs_log_ratio: float) -> StepRecord:
    health = PolicyHealth(1.0, max_abs_log_ratio, 0.0, 0.0, 0.0)
    return StepRecord(0, 0, 0, 0.0, health, 0.0, True, 0, 0.0, 0.0)


def test_an_update_taught_something_if_one_group_was_trained_on() -> None:
    dropped = replace(record(0.1), valid=False)
    assert UpdateReport([dropped, record(0.1)], [1.0], 1e-4).taught
    assert not UpdateReport([dropped, dropped], [0.0], 1e-4).taught


def test_dropped_groups_say_nothing_of_the_policy() -> None:
    dropped = replace(record(0.027), valid=False)
    values = update_metrics(UpdateReport([dropped, record(0.0)], [1.0], 1e-4))
    assert values["policy/first_max_abs_log_ratio"] == values["policy/max_abs_log_ratio"] == 0.0
    nothing = update_metrics(UpdateReport([dropped], [0.0], 1e-4))
    assert "policy/first_max_abs_log_ratio" not in nothing
    assert "policy/max_abs_log_ratio" not in nothing
    later = replace(record(0.5), update=1)
    values = update_metrics(UpdateReport([dropped, later], [0.0, 1.0], 1e-4))
    assert "policy/first_max_abs_log_ratio" not in values
    assert values["policy/max_abs_log_ratio"] == 0.5


@pytest.mark.parametrize("largest", [[0.1, NAN, 0.2], [NAN, 0.1], [0.1, NAN]])
def test_a_maximum_over_what_is_no_number_is_none_in_any_order(largest: list[float]) -> None:
    values = update_metrics(UpdateReport([record(x) for x in largest], [1.0], 1e-4))
    assert math.isnan(values["policy/first_max_abs_log_ratio"])
    assert math.isnan(values["policy/max_abs_log_ratio"])
