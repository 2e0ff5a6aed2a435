"""What has no score is left out of a reward's sums, and of what they are divided by."""

import math

import pytest
import torch

from g2rpo_ray.rollout.answers import RewardSummary, summarise


def test_what_has_no_score_adds_to_no_sum_and_no_count() -> None:
    scores = torch.tensor([[[1.0, 3.0], [math.nan, 5.0], [2.0, 2.0], [math.inf, 2.0]]])
    summary = summarise(scores, min_spread=1e-6)
    assert (summary.scores, summary.score_sum) == (6, 15.0)
    assert (summary.groups, summary.constant_groups) == (2, 1)
    assert summary.spread_sum == pytest.approx(math.sqrt(2))


def test_without_any_score_all_is_zero() -> None:
    assert summarise(torch.full((1, 2, 4), math.nan), 1e-6) == RewardSummary(0, 0.0, 0, 0.0, 0)
