"""Every algorithm's draw: what it costs, which steps it trains, and what it gives the learner."""

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from g2rpo_ray.algorithms import Draw, make_algorithm
from g2rpo_ray.algorithms.e_grpo import EGrpo
from g2rpo_ray.algorithms.mix_grpo import MixGrpo
from g2rpo_ray.config import Config
from g2rpo_ray.maths.granularity import compressed_indices
from g2rpo_ray.maths.sde import euler_step
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.sampling.group import GroupKey
from tests.rollout.tiny import (
    ALGORITHMS,
    LATENT_SIZE,
    draw_group,
    tiny_config,
    tiny_policy,
    tiny_prompt,
    tiny_sampler,
)

SHAPE = (LATENT_SIZE**2, 16)


class EvaluationCounter:
    """Counts latents at the network itself."""

    def __init__(self, policy: Policy) -> None:
        self.evaluations = 0
        self.batches: list[int] = []
        policy.transformer.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _module: nn.Module, _args: object, kwargs: dict[str, Tensor]) -> None:
        self.batches.append(len(kwargs["hidden_states"]))
        self.evaluations += self.batches[-1]


def draw(config: Config, policy: Policy, iteration: int = 0) -> Draw:
    return make_algorithm(config).draw(
        tiny_sampler(policy, config), tiny_prompt().embeds, GroupKey(config.seed, 0), iteration
    )


def assert_counts_hold(config: Config, iteration: int = 0) -> int:
    """Draw for real, compare with the algorithm's counts, and give the counted evaluations."""
    policy = tiny_policy()
    counter = EvaluationCounter(policy)
    drawn = draw(config, policy, iteration)
    shapes = [x0.shape[:2] for _, x0 in drawn.finished]
    assert set(shapes) == {(drawn.granularities, config.sampling.members)}
    pictures = sum(granularities * members for granularities, members in shapes)
    counts = make_algorithm(config).counts(iteration)
    latents_in_learner = drawn.latents.shape[0] * drawn.latents.shape[1]
    assert counter.evaluations == counts.evaluations
    assert pictures == counts.pictures
    assert len(drawn.sde_steps) == counts.groups
    assert latents_in_learner == counts.learner_passes
    assert max(counter.batches) <= config.rollout.planned_batch_size
    return counter.evaluations


PAPER = {"steps": 16, "members": 12}
FIRST_EIGHT = list(range(8))


@pytest.mark.parametrize(
    ("granularities", "expected"), [([1], 1120), ([1, 2], 1504), ([1, 2, 3], 1708)]
)
def test_g2rpo_costs_what_the_golden_numbers_say(granularities: list[int], expected: int) -> None:
    recipe = {"sde_steps": FIRST_EIGHT, "granularities": granularities}
    config = tiny_config("g2rpo", sampling=PAPER, g2rpo=recipe, rollout={"batch_size": 64})
    assert assert_counts_hold(config) == expected


@pytest.mark.parametrize("granularities", [[1], [1, 2], [1, 2, 3], [1, 3]])
@pytest.mark.parametrize(("stride", "evaluations"), [(2, 52), (3, 39), (14, 16)])
def test_a_shared_walk_costs_the_same_for_whatever_is_read_from_it(
    granularities: list[int], stride: int, evaluations: int
) -> None:
    """16 - k evaluations by the stride, rounded up, and one at step 15 if that is not among them;
    a stride of 14 leaves the first and the last."""
    recipe = {"sde_steps": FIRST_EIGHT, "granularities": granularities}
    rollout = {"batch_size": 64, "completion_stride": stride}
    config = tiny_config("g2rpo", sampling=PAPER, g2rpo=recipe, rollout=rollout)
    assert assert_counts_hold(config) == 16 + 12 * evaluations


def test_e_grpo_merges_steps_until_their_entropy_is_enough() -> None:
    """sqrt(2 pi e) a sqrt(t / (1 - t) dt) by hand, with t = 3 u / (1 + 2 u), u = 1 - k / 16."""

    def exp_entropy(start: int, end: int) -> float:
        now, first, then = (3 * (1 - k / 16) / (1 + 2 * (1 - k / 16)) for k in (start, 1, end))
        # At t = 1 the schedule's second level stands in for the pole.
        noise = 0.7 * math.sqrt(now / (1 - (now if start else first)))
        return math.sqrt(2 * math.pi * math.e * (now - then)) * noise

    algorithm = EGrpo(tiny_config("e_grpo", sampling=PAPER, e_grpo={"first": 8}))
    spans = algorithm.spans()
    assert [list(span) for span in spans] == [[0], [1], [2, 3], [4, 5], [6, 7, 8]]
    for span in spans:
        assert exp_entropy(span.start, span.stop) >= 2.2
        assert len(span) == 1 or exp_entropy(span.start, span.stop - 1) < 2.2
    assert algorithm.trained_in_words(0) == "0, 1, 2+3, 4+5, 6+7+8"
    for threshold, ends in ((3.0, [2, 4, 8]), (99.0, [15])):
        high = {"first": 8, "entropy_threshold": threshold}
        spans = EGrpo(tiny_config("e_grpo", sampling=PAPER, e_grpo=high)).spans()
        assert [span.stop for span in spans] == ends
        assert all(exp_entropy(s.start, s.stop) >= threshold for s in spans if threshold < 99)
    low = {"first": 8, "entropy_threshold": 0.1}
    spans = EGrpo(tiny_config("e_grpo", sampling=PAPER, e_grpo=low)).spans()
    assert [list(span) for span in spans] == [[k] for k in range(8)]


def test_e_grpo_costs_an_anchor_and_the_rest_of_the_way_from_each_merged_step() -> None:
    config = tiny_config("e_grpo", sampling=PAPER, e_grpo={"first": 8}, rollout={"batch_size": 64})
    assert assert_counts_hold(config) == 16 + 12 * (15 + 14 + 12 + 10 + 7)
    config = tiny_config(
        "e_grpo",
        sampling=PAPER,
        e_grpo={"first": 8},
        rollout={"batch_size": 64, "completion_stride": 2},
    )
    assert assert_counts_hold(config) == 16 + 12 * (8 + 8 + 7 + 6 + 4)


def test_a_merged_step_is_one_gaussian_from_its_start_to_its_end() -> None:
    config, policy = tiny_config("e_grpo"), tiny_policy()
    group = draw_group(policy, config)
    sampler = tiny_sampler(policy, config)
    assert group.step_indices == [0, 1, 2, 3]
    sigmas = [float(sigma) for sigma in sampler.sigmas]
    assert [(s.sigma, s.sigma_next) for s in group.sde_steps] == [
        (sigmas[0], sigmas[1]),
        (sigmas[1], sigmas[2]),
        (sigmas[2], sigmas[3]),
        (sigmas[3], sigmas[5]),
    ]
    anchor = sampler.trajectory(group.key.initial_noise(SHAPE)[None], group.prompt.embeds)
    assert torch.equal(group.latents, anchor.latents[:4])
    # All else is the ODE: from the merged step's end one step is left.
    x = group.next_latents(3)
    v = sampler.exact(x, torch.full((4,), sigmas[5]), group.prompt.embeds)
    x0 = euler_step(x, v, sigmas[5], 0.0)
    torch.testing.assert_close(group.rewards[0, 0, 3], x0.sum(dim=(-2, -1)), rtol=1e-5, atol=1e-5)


def test_where_nothing_is_merged_e_grpo_is_g2rpo_on_the_finest_grid() -> None:
    plain = tiny_config("g2rpo", g2rpo={"sde_steps": [0, 1, 2], "granularities": [1]})
    merged = tiny_config("e_grpo", e_grpo={"first": 3, "entropy_threshold": 0.1})
    one, other = (draw_group(tiny_policy(), config) for config in (plain, merged))
    assert torch.equal(one.rewards, other.rewards)
    assert one.sde_steps == other.sde_steps


@pytest.mark.parametrize(
    ("algorithm", "section", "iteration", "expected"),
    [
        # 4 members, 6 steps, window of 2 at step 1: one shared evaluation, then 5 for each member.
        ("mix_grpo", {}, 0, 6 * 4),
        ("mix_grpo", {}, 1, 1 + 5 * 4),
        ("mix_grpo", {}, 3, 3 + 3 * 4),
        ("mix_grpo", {"shared_initial_noise": False}, 1, 6 * 4),
        # After the window at 1 and 2 three steps are left; half of them, rounded, is 2.
        ("mix_grpo", {"flash": "euler", "flash_ratio": 0.5}, 1, 1 + (2 + 2) * 4),
        ("mix_grpo", {"flash": "dpm_solver", "flash_ratio": 0.1}, 0, (2 + 1) * 4),
        ("flow_grpo", {}, 0, 6 * 4),
        ("flow_grpo", {"trained_steps": "first", "first": 2}, 0, 6 * 4),
        ("dance_grpo", {}, 0, 6 * 4),
        ("dance_grpo", {"shared_initial_noise": False, "fraction": 1.0}, 5, 6 * 4),
    ],
)
def test_a_baseline_costs_what_it_says(
    algorithm: str, section: dict[str, Any], iteration: int, expected: int
) -> None:
    config = tiny_config(algorithm, **{algorithm: section})
    assert assert_counts_hold(config, iteration) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_draw_is_a_function_of_its_key(algorithm: str) -> None:
    config = tiny_config(algorithm)
    first, again = (draw_group(tiny_policy(), config) for _ in range(2))
    assert torch.equal(first.latents, again.latents)
    assert torch.equal(first.rewards, again.rewards)
    other_prompt = draw_group(tiny_policy(), config, group_id=1)
    assert not torch.equal(first.rewards, other_prompt.rewards)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trained_steps_are_a_function_of_seed_and_iteration(algorithm: str) -> None:
    config = tiny_config(algorithm)
    one, other = make_algorithm(config), make_algorithm(config)
    forward = [one.trained_steps(iteration) for iteration in range(20)]
    backward = [other.trained_steps(iteration) for iteration in reversed(range(20))]
    assert forward == backward[::-1]
    assert all(min(steps) >= 0 and max(steps) <= config.sampling.steps - 2 for steps in forward)


def test_the_window_moves_and_rolls_back() -> None:
    config = tiny_config("mix_grpo", mix_grpo={"window": 2, "shift_interval": 2, "stride": 1})
    algorithm = make_algorithm(config)
    places = [algorithm.trained_steps(iteration)[0] for iteration in range(10)]
    assert places == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]


def test_the_window_stays_at_its_last_place_without_roll_back() -> None:
    config = tiny_config("mix_grpo", mix_grpo={"shift_interval": 1, "roll_back": False})
    algorithm = make_algorithm(config)
    assert algorithm.trained_steps(1_000_000) == [3, 4]


def test_the_decaying_window_moves_sooner_at_late_steps() -> None:
    recipe = {"schedule": "decaying", "shift_interval": 8, "decay_after": 1, "decay_rate": 1.0}
    algorithm = make_algorithm(tiny_config("mix_grpo", mix_grpo=recipe))
    places = [algorithm.trained_steps(iteration)[0] for iteration in range(21)]
    assert [places.count(place) for place in range(4)] == [8, 8, 3, 2]


def test_the_random_window_goes_from_every_place_to_every_other() -> None:
    algorithm = make_algorithm(tiny_config("mix_grpo", mix_grpo={"schedule": "random"}))
    places = [algorithm.trained_steps(iteration)[0] for iteration in range(200)]
    assert set(pairwise(places)) == set(product(range(4), repeat=2))


def test_the_random_share_of_steps_differs_between_iterations() -> None:
    algorithm = make_algorithm(tiny_config("dance_grpo"))
    drawn = [tuple(algorithm.trained_steps(iteration)) for iteration in range(50)]
    assert len(set(drawn)) > 3
    assert {len(steps) for steps in drawn} == {3}
    assert all(list(steps) == sorted(set(steps)) for steps in drawn)


def test_members_start_alike_where_the_initial_noise_is_shared() -> None:
    shared = draw_group(tiny_policy(), tiny_config("dance_grpo", dance_grpo={"fraction": 1.0}))
    assert all(torch.equal(shared.latents[0, 0], latents) for latents in shared.latents[0])
    assert not torch.equal(shared.latents[1, 0], shared.latents[1, 1])
    own = draw_group(tiny_policy(), tiny_config("flow_grpo"))
    assert not torch.equal(own.latents[0, 0], own.latents[0, 1])


@pytest.mark.parametrize("algorithm", ["mix_grpo", "flow_grpo", "dance_grpo"])
def test_the_next_latents_are_where_the_walk_went(algorithm: str) -> None:
    group = draw_group(tiny_policy(), tiny_config(algorithm, mix_grpo={"window": 3}))
    neighbours = [
        position
        for position in range(len(group.step_indices) - 1)
        if group.step_indices[position + 1] == group.step_indices[position] + 1
    ]
    assert neighbours
    for position in neighbours:
        assert torch.equal(group.next_latents(position), group.latents[position + 1])


def test_the_walk_outside_the_window_is_the_ode() -> None:
    config, policy = tiny_config("mix_grpo"), tiny_policy()
    group = draw_group(policy, config, iteration=3)
    sampler = tiny_sampler(policy, config)
    start = group.key.initial_noise(SHAPE)[None]
    ode = sampler.trajectory(start, group.prompt.embeds)
    assert torch.equal(group.latents[0], ode.latents[3].expand(4, -1, -1))
    x = group.next_latents(1)
    with torch.no_grad():
        v = torch.cat(
            [
                policy(part, sampler.sigmas[5].float().expand(len(part)), group.prompt.embeds)
                for part in x.split(sampler.exact.batch_size)
            ]
        )
    x0 = euler_step(x, v, float(sampler.sigmas[5]), 0.0)
    assert torch.equal(group.rewards[0, 0, 0], x0.sum(dim=(-2, -1)))
    assert torch.equal(group.rewards[0, 0, 0], group.rewards[0, 0, 1])


def test_compressed_grids_keep_both_ends() -> None:
    assert compressed_indices(25, 4, 0.4) == [4, 7, 9, 12, 14, 17, 20, 22, 25]
    assert compressed_indices(25, 4, 1.0) == list(range(4, 26))
    assert compressed_indices(6, 5, 0.1) == [5, 6]


def test_flash_of_ratio_one_by_euler_is_the_plain_walk() -> None:
    plain = draw_group(tiny_policy(), tiny_config("mix_grpo"))
    flash = tiny_config("mix_grpo", mix_grpo={"flash": "euler", "flash_ratio": 1.0})
    assert torch.equal(draw_group(tiny_policy(), flash).rewards, plain.rewards)


def test_only_the_solver_s_flash_is_of_second_order_and_from_the_window_s_end() -> None:
    drawn = {}
    for flash in ("off", "euler", "dpm_solver"):
        config = tiny_config("mix_grpo", mix_grpo={"flash": flash, "flash_ratio": 1.0})
        ends = [MixGrpo(config).second_order_from(iteration) for iteration in range(3)]
        assert ends == ([2, 3, 4] if flash == "dpm_solver" else [None] * 3)
        drawn[flash] = draw_group(tiny_policy(), config)
    assert torch.equal(drawn["dpm_solver"].latents, drawn["off"].latents)
    assert not torch.equal(drawn["dpm_solver"].rewards, drawn["off"].rewards)


def test_the_draw_of_a_large_batch_is_that_of_a_small_one() -> None:
    for algorithm in ALGORITHMS:
        small = draw_group(tiny_policy(), tiny_config(algorithm, rollout={"batch_size": 1}))
        large = draw_group(tiny_policy(), tiny_config(algorithm, rollout={"batch_size": 64}))
        torch.testing.assert_close(small.rewards, large.rewards, rtol=1e-4, atol=1e-4)
