"""Properties of the maths that hold for any input."""

import math
import sys
from itertools import pairwise
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from g2rpo_ray.maths.advantage import integrate_advantages
from g2rpo_ray.maths.choices import Combination, Normalisation, SdeKind
from g2rpo_ray.maths.dpm_solver import dpm_solver_step
from g2rpo_ray.maths.granularity import (
    branch_plan,
    completion_indices,
    compressed_indices,
    count_g2rpo,
    count_published_order,
)
from g2rpo_ray.maths.objective import (
    StepWeight,
    clipped_policy_loss,
    gaussian_kl,
    normalise_log_prob,
    policy_health,
    step_weights,
)
from g2rpo_ray.maths.schedule import static_shift_schedule
from g2rpo_ray.maths.sde import SdeStep, euler_step, predict_x0
from g2rpo_ray.maths.step_choice import random_steps, window_stays

settings.register_profile("quick", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("quick")

KINDS: list[SdeKind] = ["flow", "dance", "cps"]
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32 - 1)
etas = st.floats(0.05, 1.5)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@st.composite
def sde_steps(draw: st.DrawFn, eta: st.SearchStrategy[float] = etas) -> SdeStep:
    steps = draw(st.integers(3, 30))
    sigmas = static_shift_schedule(steps, draw(st.floats(0.3, 5)))
    return SdeStep.at(sigmas, draw(st.integers(0, steps - 2)), draw(kinds), draw(eta))


def advantages(rewards: Tensor, weights: list[float] | None = None, clamp: float = 1e9) -> Tensor:
    weights = weights or [1.0] * len(rewards)
    return integrate_advantages(rewards, weights, clamp=clamp, min_spread=1e-6).values


# Advantages


@given(seeds, st.integers(2, 12), st.integers(1, 3), st.integers(1, 3))
def test_advantages_sum_to_zero_in_a_group(seed: int, members: int, rewards: int, lam: int) -> None:
    values = advantages(normal(rewards, lam, 4, members, seed=seed))
    torch.testing.assert_close(values.sum(dim=-1), torch.zeros(4), rtol=0, atol=1e-5)


@given(seeds, st.floats(0.01, 100), st.floats(-100, 100))
def test_advantages_are_invariant_to_affine_changes_of_a_reward(
    seed: int, scale: float, shift: float
) -> None:
    rewards = normal(2, 2, 3, 6, seed=seed)
    changed = rewards.clone()
    changed[0] = scale * changed[0] + shift
    torch.testing.assert_close(advantages(changed), advantages(rewards), rtol=1e-4, atol=1e-5)


@given(seeds)
def test_the_order_of_members_and_steps_only_reorders_advantages(seed: int) -> None:
    rewards = normal(2, 2, 3, 6, seed=seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(advantages(rewards[..., order]), advantages(rewards)[:, order])
    torch.testing.assert_close(advantages(rewards.flip(2)), advantages(rewards).flip(0))


@given(seeds, st.floats(0.1, 3))
def test_the_clamp_bounds_the_sum_once(seed: int, clamp: float) -> None:
    rewards = normal(3, 3, 2, 6, seed=seed)
    expected = advantages(rewards).clamp(-clamp, clamp)
    torch.testing.assert_close(advantages(rewards, clamp=clamp), expected)


@given(seeds, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 3))
def test_an_invalid_reward_drops_its_group_and_no_other(seed: int, bad: float, step: int) -> None:
    rewards = normal(2, 2, 4, 5, seed=seed)
    broken = rewards.clone()
    broken[1, 0, step, 2] = bad
    result = integrate_advantages(broken, [1.0, 1.0], clamp=5.0, min_spread=1e-6)
    assert result.valid.tolist() == [k != step for k in range(4)]
    assert result.values[step].abs().max() == 0
    others = [k for k in range(4) if k != step]
    torch.testing.assert_close(result.values[others], advantages(rewards, clamp=5.0)[others])


@given(seeds, st.integers(0, 3))
def test_a_reward_that_is_not_required_is_left_out_of_its_group(seed: int, step: int) -> None:
    rewards = normal(2, 2, 4, 5, seed=seed)
    broken = rewards.clone()
    broken[1, 0, step, 2] = math.nan
    result = integrate_advantages(
        broken, [1.0, 1.0], clamp=1e9, min_spread=1e-6, required=[True, False]
    )
    assert bool(result.valid.all())
    torch.testing.assert_close(result.values[step], advantages(rewards[:1])[step])
    others = [k for k in range(4) if k != step]
    torch.testing.assert_close(result.values[others], advantages(rewards)[others])


def test_a_group_without_any_reward_is_dropped_even_if_none_is_required() -> None:
    rewards = normal(2, 1, 2, 4, seed=0)
    rewards[:, :, 1] = math.nan
    result = integrate_advantages(
        rewards, [1.0, 1.0], clamp=5.0, min_spread=1e-6, required=[False, False]
    )
    assert result.valid.tolist() == [True, False]
    assert result.values[1].abs().max() == 0


@given(seeds, st.floats(0.1, 10), st.floats(0.1, 10))
def test_rewards_may_be_added_before_they_are_normalised(seed: int, a: float, b: float) -> None:
    rewards = normal(2, 2, 3, 6, seed=seed)
    result = integrate_advantages(
        rewards, [a, b], clamp=1e9, min_spread=1e-6, combine="rewards"
    ).values
    torch.testing.assert_close(result, advantages(a * rewards[:1] + b * rewards[1:]))


def test_the_way_to_combine_matters_where_one_scale_is_wider() -> None:
    wide = torch.tensor([[[[0.0, 100.0]]], [[[1.0, 0.0]]]])
    common = {"clamp": 5.0, "min_spread": 1e-6}
    added = integrate_advantages(wide, [1.0, 1.0], **common).values[0]  # type: ignore[arg-type]
    summed = integrate_advantages(wide, [1.0, 1.0], **common, combine="rewards")  # type: ignore[arg-type]
    torch.testing.assert_close(added, torch.zeros(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(summed.values[0], torch.tensor([-1.0, 1.0]) / math.sqrt(2))


@pytest.mark.parametrize("normalisation", ["std", "mean_only"])
@pytest.mark.parametrize("combine", ["advantages", "rewards"])
def test_advantages_are_those_of_plain_python(
    normalisation: Normalisation, combine: Combination
) -> None:
    """Equations 12 and 13 a number at a time: two rewards, two granularities, the clamp cuts
    some."""
    rewards, weights = normal(2, 2, 3, 4, seed=5), [0.5, 2.0]
    table = rewards.tolist()
    if combine == "rewards":
        summed = [
            [[sum(w * r[g][k][m] for w, r in zip(weights, table, strict=True)) for m in range(4)]
             for k in range(3)]
            for g in range(2)
        ]  # fmt: skip
        table, shares = [summed], [1.0]
    else:
        shares = weights
    expected = torch.zeros(3, 4)
    for share, reward in zip(shares, table, strict=True):
        for granularity in reward:
            for k, group in enumerate(granularity):
                spread = stdev(group) if normalisation == "std" else 1.0
                for m, value in enumerate(group):
                    expected[k, m] += share * (value - fmean(group)) / spread
    clamp = float(expected.abs().quantile(0.7))
    assert expected.abs().max() > 1.1 * clamp
    result = integrate_advantages(
        rewards, weights, clamp=clamp, min_spread=1e-6, normalisation=normalisation, combine=combine
    )
    torch.testing.assert_close(result.values, expected.clamp(-clamp, clamp))


@given(st.floats(-10, 10), st.floats(0, 1e-7))
def test_a_constant_group_gives_zero_and_is_counted(value: float, jitter: float) -> None:
    rewards = torch.full((1, 1, 1, 4), value, dtype=torch.float64)
    rewards[..., 0] += jitter
    result = integrate_advantages(rewards, [1.0], clamp=5.0, min_spread=1e-6)
    assert result.values.abs().max() == 0
    assert bool(result.constant.all())
    assert bool(result.valid.all())


def test_constant_are_only_those_that_could_be_compared_and_do_not_differ() -> None:
    flat, broken = torch.ones(4), torch.tensor([1.0, math.nan, 1.0, 1.0])
    rewards = torch.stack([flat, torch.arange(4.0), broken])[None, None].repeat(2, 2, 1, 1)
    result = integrate_advantages(rewards, [1.0, 1.0], clamp=5.0, min_spread=0.0)
    assert result.constant.tolist() == [[[True, False, False]] * 2] * 2
    one_step = integrate_advantages(rewards[:, :, :1], [1.0, 1.0], clamp=5.0, min_spread=0.0)
    assert one_step.constant.tolist() == [[[True]] * 2] * 2


# Stochastic steps


@given(sde_steps(eta=st.floats(1e-6, 1e-5)), seeds)
def test_the_sde_with_vanishing_eta_meets_the_ode(step: SdeStep, seed: int) -> None:
    x, v, noise = normal(3, 2, 4, 5, seed=seed)
    ode = euler_step(x, v, step.sigma, step.sigma_next)
    sde = step.sample(step.mean(x, v), noise)
    torch.testing.assert_close(sde, ode, rtol=0, atol=1e-3)


@given(sde_steps(), seeds)
def test_the_log_probability_is_that_of_the_normal_distribution(step: SdeStep, seed: int) -> None:
    next_x, mean = normal(2, 3, 4, 5, seed=seed)
    expected = torch.distributions.Normal(mean, step.std).log_prob(next_x).mean(dim=(-2, -1))
    torch.testing.assert_close(step.log_prob(next_x, mean), expected)


@given(sde_steps(), seeds)
def test_the_squared_error_is_without_the_variance(step: SdeStep, seed: int) -> None:
    next_x, mean = normal(2, 3, 4, 5, seed=seed)
    expected = -((next_x - mean) ** 2).flatten(1).mean(dim=1)
    torch.testing.assert_close(step.log_prob(next_x, mean, "squared_error"), expected)


@given(sde_steps(), seeds)
def test_the_injected_noise_has_the_step_s_deviation(step: SdeStep, seed: int) -> None:
    noise = normal(4, 100, 10, seed=seed)
    mean = torch.zeros_like(noise)
    torch.testing.assert_close(step.sample(mean, noise), step.std * noise)


@given(st.integers(3, 30), st.floats(0.1, 1.9), seeds)
def test_cps_keeps_the_amount_of_noise(steps: int, eta: float, seed: int) -> None:
    sigmas = static_shift_schedule(steps, 3.0)
    step = SdeStep.at(sigmas, seed % (steps - 1), "cps", eta)
    kept = step.sigma_next * math.cos(eta * math.pi / 2)
    assert math.hypot(kept, step.std) == pytest.approx(step.sigma_next)


@given(st.integers(1, 40), st.floats(0.2, 6))
def test_a_schedule_falls_from_one_to_zero(steps: int, shift: float) -> None:
    sigmas = static_shift_schedule(steps, shift)
    assert (sigmas[0], sigmas[-1]) == (1, 0)
    assert bool((sigmas.diff() < 0).all())


# Objective


@given(seeds, st.sampled_from([1e-4, 0.2]))
def test_ratio_one_gives_the_plain_policy_gradient(seed: int, clip: float) -> None:
    log_prob, advantage = normal(2, 6, seed=seed)
    log_prob.requires_grad_()
    clipped_policy_loss(log_prob, log_prob.detach(), advantage, clip).loss.backward()
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, -advantage / 6)


@given(seeds, st.floats(0.01, 0.3))
def test_a_clipped_member_has_no_gradient(seed: int, clip: float) -> None:
    old, advantage, change = normal(3, 8, seed=seed)
    log_prob = (old + change).requires_grad_()
    result = clipped_policy_loss(log_prob, old, advantage, clip)
    result.loss.backward()
    ratio = change.exp()
    clipped = ((ratio > 1 + clip) & (advantage > 0)) | ((ratio < 1 - clip) & (advantage < 0))
    assert log_prob.grad is not None
    assert torch.equal(log_prob.grad == 0, clipped)
    health = policy_health(result.log_ratio, advantage, clip)
    share = health.clip_fraction_low + health.clip_fraction_high
    assert share == pytest.approx(float(clipped.double().mean()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e4])
def test_a_ratio_that_is_not_finite_is_masked_and_leaves_no_trace(bad: float) -> None:
    old, advantage = normal(2, 4, seed=0)
    log_prob = old.clone()
    log_prob[1] += bad
    log_prob.requires_grad_()
    result = clipped_policy_loss(log_prob, old, advantage, 0.2)
    result.loss.backward()
    assert result.usable.tolist() == [True, False, True, True]
    assert log_prob.grad is not None
    assert log_prob.grad[1] == 0
    assert bool(log_prob.grad.isfinite().all())
    assert bool(result.loss.isfinite())


@given(sde_steps(), seeds)
def test_the_normalised_log_ratio_is_the_noise_along_the_move(step: SdeStep, seed: int) -> None:
    old_mean, move, noise = normal(3, 2, 4, 5, seed=seed)
    mean, next_x = old_mean + 1e-2 * move, step.sample(old_mean, noise)
    new = normalise_log_prob(step.log_prob(next_x, mean), mean, old_mean, step.std)
    old = normalise_log_prob(step.log_prob(next_x, old_mean), old_mean, old_mean, step.std)
    expected = (noise * (mean - old_mean)).mean(dim=(-2, -1))
    torch.testing.assert_close(new - old, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_health_is_that_of_plain_python(clip: float) -> None:
    # Inside, at the edges of clip 0, out on both sides; with an advantage for, against and of none.
    log_ratios = [0.05, 0.0, 0.0, 0.3, 0.3, 0.3, -0.2, -0.2, -0.2]
    advantages = [1.0, 1.0, -1.0, 2.0, -1.0, 0.0, 1.0, -2.0, 0.0]
    health = policy_health(torch.tensor(log_ratios), torch.tensor(advantages), clip)
    assert health.ratio_mean == pytest.approx(fmean(map(math.exp, log_ratios)))
    assert health.max_abs_log_ratio == pytest.approx(0.3)
    kl = fmean(math.exp(x) - 1 - x for x in log_ratios)
    assert health.approx_kl == pytest.approx(kl, rel=1e-5)
    assert health.clip_fraction_low == pytest.approx(1 / 9)
    assert health.clip_fraction_high == pytest.approx((2 if clip == 0 else 1) / 9)


def test_what_health_is_read_from_holds_no_graph() -> None:
    log_prob = torch.zeros(4, requires_grad=True)
    result = clipped_policy_loss(log_prob, torch.zeros(4), torch.ones(4), 0.1)
    assert result.loss.requires_grad
    assert not result.log_ratio.requires_grad


@given(seeds, st.floats(0.05, 2))
def test_the_kl_is_that_of_two_normal_distributions(seed: int, std: float) -> None:
    mean, reference = normal(2, 3, 4, 5, seed=seed)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(reference, std)
    )
    torch.testing.assert_close(gaussian_kl(mean, reference, std), exact.mean())


@pytest.mark.parametrize("kind", ["uniform", "noise", "inverse_dt"])
def test_step_weights_have_mean_one_and_the_published_proportions(kind: StepWeight) -> None:
    sigmas = static_shift_schedule(16, 3.0)
    steps = [SdeStep.at(sigmas, k, "flow", 0.7) for k in range(8)]
    weights = step_weights(steps, kind)
    assert sum(weights) / 8 == pytest.approx(1)
    sources = {
        "uniform": [1.0] * 8,
        "noise": [
            0.7 * math.sqrt(s.sigma / (1 - (s.sigma if k else s.sigma_next)) * s.dt)
            for k, s in enumerate(steps)
        ],
        "inverse_dt": [1 / s.dt for s in steps],
    }
    ratios = [weight / source for weight, source in zip(weights, sources[kind], strict=True)]
    assert ratios == pytest.approx([ratios[0]] * 8)


# Grids and solver


@given(st.integers(3, 25), st.sets(st.integers(1, 5), min_size=1), st.data())
def test_the_plan_reaches_every_grid_and_shares_its_prefixes(
    steps: int, granularities: set[int], data: st.DataObject
) -> None:
    k, recipe = data.draw(st.integers(0, steps - 2)), sorted(granularities)
    reached: dict[int, list[int]] = {}
    walk = [(branch_plan(steps, k, recipe), [k + 1])]
    while walk:
        node, path = walk.pop()
        for position in node.completes:
            reached[position] = path
        assert node.depth == 1 + max((child.depth for child in node.children.values()), default=0)
        walk += [(child, [*path, index]) for index, child in node.children.items()]
    grids = [completion_indices(steps, k, granularity)[:-1] for granularity in recipe]
    assert [reached[position] for position in range(len(recipe))] == grids
    assert branch_plan(steps, k, recipe).depth == max(map(len, grids))
    assert count_g2rpo(steps, [k], recipe, 4).evaluations <= count_published_order(
        steps, [k], recipe, 4
    )


@given(st.integers(3, 25), st.integers(2, 30), st.data())
def test_a_shared_walk_is_evaluated_at_its_ends_and_every_stride_between(
    steps: int, stride: int, data: st.DataObject
) -> None:
    k, recipe = data.draw(st.integers(0, steps - 2)), [1, 2, 3]
    root = node = branch_plan(steps, k, recipe, stride)
    path = [node.index]
    while node.children:
        assert not node.completes
        [(index, node)] = node.children.items()
        assert index == node.index
        path.append(index)
    assert node.completes == [0, 1, 2]
    assert (path[0], path[-1]) == (k + 1, steps - 1)
    gaps = [b - a for a, b in pairwise(path)]
    assert all(gap == stride for gap in gaps[:-1])
    assert all(1 <= gap <= stride for gap in gaps)
    assert root.depth == root.evaluations == len(path)
    assert count_g2rpo(steps, [k], recipe, 4, stride).evaluations == steps + 4 * len(path)


def test_a_plan_may_be_deeper_than_python_calls() -> None:
    steps = 3 * sys.getrecursionlimit()
    assert branch_plan(steps, 0, [1, 2]).depth == steps - 1
    # They share the first two.
    walks = (steps - 1) + steps // 2 - 2
    assert count_g2rpo(steps, [0], [1, 2], 2).evaluations == steps + 2 * walks


@given(st.integers(3, 50), st.floats(0.01, 1), st.data())
def test_a_compressed_grid_rises_to_the_end(steps: int, ratio: float, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, steps - 1))
    indices = compressed_indices(steps, first, ratio)
    assert (indices[0], indices[-1]) == (first, steps)
    assert indices == sorted(set(indices))
    assert len(indices) - 1 == max(1, round(ratio * (steps - first)))


@given(seeds, st.floats(0.05, 0.9), st.floats(0.01, 0.99))
def test_the_first_and_the_last_solver_step_are_euler_s(
    seed: int, sigma: float, share: float
) -> None:
    x, v, other = normal(3, 2, 4, 5, seed=seed)
    x0 = predict_x0(x, v, sigma)
    first = dpm_solver_step(x, x0, sigma, share * sigma, None)
    torch.testing.assert_close(first, euler_step(x, v, sigma, share * sigma))
    last = dpm_solver_step(x, x0, sigma, 0.0, (other, sigma + 0.05))
    torch.testing.assert_close(last, x0)


@given(seeds, st.floats(0.3, 0.9), st.floats(0.1, 0.9), st.floats(0.01, 0.09))
def test_a_later_solver_step_is_the_published_one(
    seed: int, sigma: float, share: float, before: float
) -> None:
    x, x0, x0_before = normal(3, 2, 4, 5, seed=seed)
    sigma_next = share * sigma
    l_before, l_now, l_next = (
        math.log(1 - s) - math.log(s) for s in (sigma + before, sigma, sigma_next)
    )
    h, r = l_next - l_now, (l_now - l_before) / (l_next - l_now)
    promised = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * x0_before
    expected = sigma_next / sigma * x - (1 - sigma_next) * (math.exp(-h) - 1) * promised
    found = dpm_solver_step(x, x0, sigma, sigma_next, (x0_before, sigma + before))
    torch.testing.assert_close(found, expected)


def test_the_solver_is_of_second_order() -> None:
    """On Gaussian data, where the velocity is known: x0 = x (1 - s) / ((1 - s)^2 + s^2)."""

    def promise(x: Tensor, sigma: float) -> Tensor:
        return x * (1 - sigma) / ((1 - sigma) ** 2 + sigma**2)

    def solve(steps: int, second_order: bool) -> float:
        sigmas = torch.linspace(0.8, 0.2, steps + 1, dtype=torch.float64).tolist()
        x, previous = torch.ones(1, dtype=torch.float64), None
        for sigma, sigma_next in pairwise(sigmas):
            x0 = promise(x, sigma)
            x = dpm_solver_step(x, x0, sigma, sigma_next, previous)
            previous = (x0, sigma) if second_order else None
        return float(x)

    # The exact flow keeps x over the standard deviation of its distribution.
    exact = math.hypot(0.8, 0.2) / math.hypot(0.2, 0.8)
    errors = [abs(solve(steps, second_order=True) - exact) for steps in (20, 40)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)
    assert errors[0] < abs(solve(20, second_order=False) - exact) / 5


# Which steps


def test_a_window_stays_as_the_paper_says() -> None:
    places = range(0, 8, 2)
    assert window_stays("progressive", places, 25, 3, 0.5) == [25] * 4
    # ceil(25 e^(-(place - 3) / 2)) behind place 3
    assert window_stays("decaying", places, 25, 3, 0.5) == [25, 25, 16, 6]


@pytest.mark.parametrize(("fraction", "count"), [(0.01, 1), (0.6, 14), (1.0, 24)])
def test_a_share_of_the_steps_is_rounded_and_never_empty(fraction: float, count: int) -> None:
    assert len(random_steps(0, 0, 24, fraction)) == count
