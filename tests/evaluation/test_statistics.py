"""Intervals that cover as often as they say, and differences that stay paired."""

import numpy as np
import pytest

from g2rpo_ray.evaluation.statistics import RESAMPLES, estimate, paired_difference


def test_the_interval_is_the_normal_one_for_many_normal_values() -> None:
    values = np.random.default_rng(1).normal(0.3, 0.05, 400)
    found = estimate(values)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert found.mean == values.mean()
    assert found.low == pytest.approx(values.mean() - half, abs=0.03 * 2 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03 * 2 * half)
    assert found.prompts == 400


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for number in range(200):
        found = estimate(generator.exponential(1.0, 60), seed=number)
        covered += found.low <= 1.0 <= found.high
    # 95% of 200 are 190; skewed values and 60 prompts cost the percentile bootstrap a little.
    assert 178 <= covered <= 199


def test_the_same_values_give_the_same_interval() -> None:
    values = np.random.default_rng(3).random(50)
    assert estimate(values) == estimate(values.copy())
    assert estimate(values, seed=1) != estimate(values)


def test_pairing_takes_out_what_prompts_differ_by() -> None:
    generator = np.random.default_rng(4)
    prompts = generator.normal(0, 1.0, 100)
    base = prompts + generator.normal(0, 0.01, 100)
    trained = prompts + 0.05 + generator.normal(0, 0.01, 100)
    paired = paired_difference(trained, base).difference
    assert paired.low > 0.04
    assert paired.high < 0.06
    # Unpaired, the prompts' own spread would hide it.
    assert estimate(trained).low < estimate(base).high


def test_the_share_that_got_worse_counts_prompts() -> None:
    base = np.array([0.5, 0.5, 0.5, 0.5])
    found = paired_difference(np.array([0.9, 0.4, 0.5, 0.9]), base)
    assert found.worse_share == 0.25
    assert found.difference.mean == pytest.approx(0.175)


def test_prompts_without_a_score_are_left_out_on_both_sides_and_counted() -> None:
    trained = np.array([1.0, np.nan, 3.0, 4.0])
    base = np.array([0.5, 0.5, np.nan, 0.5])
    found = paired_difference(trained, base)
    assert found.difference.prompts == 2
    assert found.difference.mean == 2.0
    assert estimate(trained).prompts == 3


@pytest.mark.parametrize("values", [[], [np.nan]])
def test_no_score_is_no_number(values: list[float]) -> None:
    found = estimate(np.array(values, dtype=np.float64))
    assert found.prompts == 0
    assert np.isnan([found.mean, found.low, found.high]).all()
    assert np.isnan(paired_difference(np.array(values), np.array(values)).worse_share)


def test_one_prompt_has_no_interval() -> None:
    found = estimate(np.array([0.4]))
    assert found.mean == 0.4
    assert np.isnan(found.low)
    assert np.isnan(found.high)


def test_many_prompts_are_resampled_in_pieces_of_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(5).random(1000)
    monkeypatch.setattr("g2rpo_ray.evaluation.statistics._CHUNK", 7 * 1000)
    found = estimate(values)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert found.high - found.low == pytest.approx(2 * half, rel=0.05)
    assert RESAMPLES % 7
