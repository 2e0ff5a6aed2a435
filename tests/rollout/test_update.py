"""The learner's update on real draws: the first ratio, the options, and what is masked."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.config import Config
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.update import UpdateReport, assign, update_on_groups
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.plan.arithmetic import updates_per_iteration
from g2rpo_ray.sampling.group import RolloutGroup
from g2rpo_ray.training.collect import update_metrics
from tests.rollout.tiny import ALGORITHMS, PlainEngine, draw_group, tiny_config, tiny_policy

CPU = torch.device("cpu")


def update(
    engine: PlainEngine, groups: list[RolloutGroup], config: Config, **arguments: Any
) -> UpdateReport:
    settings = {"prompts": len(groups), "ranks": 1, "device": CPU} | arguments
    weights = [1.0] * len(groups)
    return update_on_groups(engine, groups, weights, config=config, **settings)  # type: ignore[arg-type]


def gradient_of(config: Config, groups: list[RolloutGroup], policy: Policy | None = None) -> Tensor:
    """The first step's gradient of all parameters as one vector."""
    engine = PlainEngine(policy or tiny_policy())
    update(engine, groups, config)
    first = engine.gradients[0]
    return torch.cat([first[name].flatten() for name in sorted(first)])


def assert_same_gradient(found: Tensor, expected: Tensor) -> None:
    """By its own size: of these, many numbers are smaller than PyTorch's usual tolerance."""
    assert expected.norm() > 0
    assert (found - expected).norm() < 1e-4 * expected.norm()


def draw_groups(config: Config, count: int = 2, policy: Policy | None = None) -> list[RolloutGroup]:
    policy = policy or tiny_policy()
    return [draw_group(policy, config, group_id) for group_id in range(count)]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_ratio_before_the_first_update_is_exactly_one(algorithm: str, batch_size: int) -> None:
    config = tiny_config(algorithm, rollout={"batch_size": batch_size})
    policy = tiny_policy()
    engine = PlainEngine(policy)
    report = update(engine, draw_groups(config, policy=policy), config)
    assert (sum(engine.ended), engine.ended[-1]) == (1, True)
    assert report.taught
    assert len(report.records) == 2 * len(draw_group(policy, config).sde_steps)
    assert max(record.health.max_abs_log_ratio for record in report.records) == 0.0
    assert len(report.grad_norms) == 1
    assert report.grad_norms[0] > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_update_for_each_step_moves_the_ratio_of_the_next(algorithm: str) -> None:
    config = tiny_config(algorithm, learner={"update": "per_sde_step"})
    policy = tiny_policy()
    groups = draw_groups(config, policy=policy)
    engine = PlainEngine(policy)
    report = update(engine, groups, config)
    steps = len(groups[0].sde_steps)
    assert len(report.grad_norms) == steps
    assert sum(engine.ended) == steps
    assert engine.ended[-1]
    for record in report.records:
        assert (record.health.max_abs_log_ratio == 0.0) == (record.update == 0)


def step_alone(group: RolloutGroup, position: int) -> RolloutGroup:
    return replace(
        group,
        sde_steps=[group.sde_steps[position]],
        step_indices=[group.step_indices[position]],
        latents=group.latents[position, None],
        velocities=group.velocities[position, None],
        rewards=group.rewards[:, :, position, None],
    )


def test_an_update_for_each_step_is_of_the_size_of_one_on_that_step_alone() -> None:
    config = tiny_config("g2rpo", learner={"update": "per_sde_step"})
    groups = draw_groups(config)
    alone = gradient_of(tiny_config("g2rpo"), [step_alone(group, 0) for group in groups])
    assert_same_gradient(gradient_of(config, groups), alone)


def test_several_steps_that_fit_are_one_pass_of_the_network() -> None:
    config = tiny_config("g2rpo", learner={"steps_per_pass": 3})
    groups = draw_groups(config, count=1)
    engine = PlainEngine(tiny_policy())
    forward = mock.Mock(wraps=engine.policy.forward)
    engine.policy.forward = forward  # type: ignore[method-assign]
    update(engine, groups, config)
    assert (forward.call_count, engine.ended) == (1, [True])


def test_ranks_without_a_group_of_their_own_repeat_one_with_weight_zero() -> None:
    assert assign(5, 0, 2) == [(0, 1.0), (2, 1.0), (4, 1.0)]
    assert assign(5, 1, 2) == [(1, 1.0), (3, 1.0), (0, 0.0)]
    assert assign(1, 2, 3) == [(0, 0.0)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_batch_of_the_passes_does_not_change_the_gradient(algorithm: str) -> None:
    config = tiny_config(algorithm)
    groups = draw_groups(config)
    split = [replace(group, batch_size=1) for group in groups]
    assert_same_gradient(gradient_of(config, groups), gradient_of(config, split))


@pytest.mark.parametrize("algorithm", ["mix_grpo", "flow_grpo", "dance_grpo"])
@pytest.mark.parametrize("old_log_prob", ["rollout", "learner"])
def test_the_smallest_batch_of_all_ranks_is_everyones(algorithm: str, old_log_prob: str) -> None:
    settings = {"old_log_prob": old_log_prob, "update": "per_sde_step"}
    config = tiny_config(algorithm, learner=settings)
    first, second = draw_groups(config)
    small, large = replace(first, batch_size=2), replace(second, batch_size=4)
    passes = []
    for group, others in ((small, 4), (large, 2), (large, 4)):
        engine = PlainEngine(tiny_policy(), others_batch_size=others)
        forward = mock.Mock(wraps=engine.policy.forward)
        engine.policy.forward = forward  # type: ignore[method-assign]
        update(engine, [group], config, prompts=2, ranks=2)
        passes.append((forward.call_count, len(engine.ended)))
    assert passes[0] == passes[1] > passes[2]
    mixed = PlainEngine(tiny_policy())
    update(mixed, [large, small], config)
    assert len(mixed.ended) == 2 * passes[0][1]


@pytest.mark.parametrize("algorithm", ["g2rpo", "flow_grpo"])
def test_the_order_of_prompts_changes_nothing(algorithm: str) -> None:
    config = tiny_config(algorithm)
    groups = draw_groups(config)
    forward = gradient_of(config, groups)
    assert_same_gradient(gradient_of(config, groups[::-1]), forward)


def test_ranks_that_share_the_groups_add_up_to_one_rank() -> None:
    config = tiny_config("mix_grpo")
    groups = draw_groups(config)
    parts = []
    for group in groups:
        engine = PlainEngine(tiny_policy())
        update(engine, [group], config, prompts=2, ranks=2)
        gradient = engine.gradients[0]
        parts.append(torch.cat([gradient[name].flatten() for name in sorted(gradient)]))
    assert_same_gradient((parts[0] + parts[1]) / 2, gradient_of(config, groups))


def test_step_weights_weigh_the_gradients_of_the_steps() -> None:
    uniform = tiny_config("g2rpo", g2rpo={"sde_steps": [0, 2]})
    weighted = tiny_config("g2rpo", g2rpo={"sde_steps": [0, 2]}, learner={"step_weight": "noise"})
    group = draw_group(tiny_policy(), uniform)
    alone = []
    for position in range(2):
        alone.append(gradient_of(uniform, [step_alone(group, position)]))
    stds = torch.tensor([step.std for step in group.sde_steps])
    expected = (stds / stds.sum()) @ torch.stack(alone)
    assert_same_gradient(gradient_of(weighted, [group]), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_normalised_ratio_starts_at_one_with_the_gradient_scaled_by_the_noise(
    algorithm: str,
) -> None:
    plain = tiny_config(algorithm, g2rpo={"sde_steps": [1]}, mix_grpo={"window": 1})
    normal = tiny_config(
        algorithm,
        g2rpo={"sde_steps": [1]},
        mix_grpo={"window": 1},
        learner={"normalise_ratio": True},
    )
    groups = draw_groups(plain, count=1)
    report = update(PlainEngine(tiny_policy()), groups, normal)
    assert max(record.health.max_abs_log_ratio for record in report.records) == 0.0
    if len(groups[0].sde_steps) == 1:
        scaled = gradient_of(plain, groups) * groups[0].sde_steps[0].std
        assert_same_gradient(gradient_of(normal, groups), scaled)


@pytest.mark.parametrize("update_rule", ["per_iteration", "per_sde_step"])
@pytest.mark.parametrize("algorithm", ["g2rpo", "flow_grpo"])
def test_old_log_probabilities_of_the_learner_make_up_for_another_rollout(
    algorithm: str, update_rule: str
) -> None:
    config = tiny_config(algorithm, learner={"old_log_prob": "learner", "update": update_rule})
    groups = draw_groups(config)
    # As if the rollout had computed in another precision: the samples stay as they were.
    policy = tiny_policy()
    with torch.no_grad():
        policy.transformer.proj_out.weight.mul_(1.001)
    report = update(PlainEngine(policy), groups, config)
    first = [r.health.max_abs_log_ratio for r in report.records if r.update == 0]
    later = [r.health.max_abs_log_ratio for r in report.records if r.update > 0]
    assert max(first) == 0.0
    assert all(value > 0 for value in later)
    from_rollout = tiny_config(algorithm)
    compared = update(PlainEngine(policy), groups, from_rollout)
    assert max(r.health.max_abs_log_ratio for r in compared.records) > 0


@pytest.mark.parametrize("old_log_prob", ["rollout", "learner"])
def test_old_log_probabilities_of_the_learner_hold_for_every_update_of_an_iteration(
    old_log_prob: str,
) -> None:
    settings = {"old_log_prob": old_log_prob, "update": "per_sde_step"}
    config = tiny_config("g2rpo", learner=settings)
    groups = draw_groups(config)
    policy = tiny_policy()
    with torch.no_grad():
        policy.transformer.proj_out.weight.mul_(1.001)
    # Steps that move nothing: what is left is the difference to the rollout.
    report = update(PlainEngine(policy, learning_rate=0.0), groups, config)
    moved = {record.health.max_abs_log_ratio > 0 for record in report.records}
    assert moved == {old_log_prob == "rollout"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_on_parts_of_the_members_begin_at_one_and_move_the_ratio(algorithm: str) -> None:
    config = tiny_config(algorithm, rollout={"batch_size": 2}, learner={"updates_per_iteration": 2})
    policy = tiny_policy()
    groups = draw_groups(config, policy=policy)
    counts = make_algorithm(config).counts(0)
    engine = PlainEngine(policy, learning_rate=0.1)
    report = update(engine, groups, config)
    assert len(report.grad_norms) == sum(engine.ended) == updates_per_iteration(config, counts) == 2
    assert len(report.records) == 2 * 2 * len(groups[0].sde_steps)
    for record in report.records:
        assert (record.health.max_abs_log_ratio == 0.0) == (record.update == 0)
    assert update_metrics(report)["groups/trained"] == 2 * counts.groups
    rows = 1 if groups[0].latents.shape[1] == 1 else 2
    assert rows * len(engine.ended) == 2 * counts.learner_passes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_parts_gradients_have_the_whole_groups_mean(algorithm: str) -> None:
    whole, parts = (
        tiny_config(algorithm, learner={"updates_per_iteration": count}) for count in (1, 2)
    )
    groups = draw_groups(whole)
    engine = PlainEngine(tiny_policy(), learning_rate=0.0)
    update(engine, groups, parts)
    halves = [torch.cat([g[name].flatten() for name in sorted(g)]) for g in engine.gradients]
    assert not torch.equal(*halves)
    assert_same_gradient(torch.stack(halves).mean(dim=0), gradient_of(whole, groups))


@pytest.mark.parametrize("algorithm", ["g2rpo", "mix_grpo"])
def test_old_log_probabilities_of_the_learner_are_of_before_the_first_part(algorithm: str) -> None:
    config = tiny_config(algorithm, learner={"old_log_prob": "learner", "updates_per_iteration": 2})
    groups = draw_groups(config)
    policy = tiny_policy()
    with torch.no_grad():
        policy.transformer.proj_out.weight.mul_(1.001)
    still = update(PlainEngine(policy, learning_rate=0.0), groups, config)
    assert max(record.health.max_abs_log_ratio for record in still.records) == 0.0
    moved = update(PlainEngine(policy, learning_rate=0.1), groups, config)
    assert all(r.health.max_abs_log_ratio > 0 for r in moved.records if r.update == 1)


def test_kl_is_zero_at_the_reference_and_grows_away_from_it() -> None:
    config = tiny_config("flow_grpo", model={"lora": {"rank": 2}}, learner={"kl_weight": 0.5})
    policy = tiny_policy(lora=True)
    groups = draw_groups(config, policy=policy)
    fresh = update(PlainEngine(policy), groups, config)
    assert {record.kl_to_reference for record in fresh.records} == {0.0}
    policy = moved_policy()
    away = update(PlainEngine(policy), groups, config)
    assert min(record.kl_to_reference for record in away.records) > 0


def test_kl_pulls_back_to_the_reference() -> None:
    policy = moved_policy()
    without = tiny_config("g2rpo", model={"lora": {"rank": 2}})
    pulled = tiny_config("g2rpo", model={"lora": {"rank": 2}}, learner={"kl_weight": 1.0})
    groups = draw_groups(without, policy=policy)
    flat = [replace(group, rewards=torch.ones_like(group.rewards)) for group in groups]
    assert gradient_of(without, flat, moved_policy()).norm() == 0
    engine = PlainEngine(policy, learning_rate=1.0)
    before = update(engine, flat, pulled).records
    after = update(engine, flat, pulled).records
    assert sum(r.kl_to_reference for r in after) < sum(r.kl_to_reference for r in before)
    trained = {name for gradient in engine.gradients for name in gradient}
    assert trained
    assert all("lora_" in name for name in trained)


def moved_policy() -> Policy:
    """A policy whose adapters are no longer zero."""
    policy = tiny_policy(lora=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.transformer.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


# The second is finite, and overflows in the network, in the rollout as here.
@pytest.mark.parametrize("latents", [math.inf, 3e38])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_group_with_infinite_latents_is_dropped_without_a_trace(
    algorithm: str, latents: float
) -> None:
    config = tiny_config(algorithm, advantage={"on_invalid": "drop_group"})
    sound, other = draw_groups(config)
    broken = replace(
        other,
        latents=torch.full_like(other.latents, latents),
        velocities=torch.full_like(other.velocities, math.nan),
        rewards=torch.full_like(other.rewards, math.nan),
    )
    engine = PlainEngine(tiny_policy())
    report = update(engine, [sound, broken], config)
    assert {r.valid for r in report.records if r.group_id == broken.key.group_id} == {False}
    assert math.isfinite(report.grad_norms[0])
    gradient = torch.cat([engine.gradients[0][n].flatten() for n in sorted(engine.gradients[0])])
    assert_same_gradient(gradient, gradient_of(config, [sound]) / 2)


def test_where_every_group_is_dropped_the_step_is_held() -> None:
    config = tiny_config("g2rpo", advantage={"on_invalid": "drop_group"})
    sound, other = draw_groups(config)
    lost = [replace(g, rewards=torch.full_like(g.rewards, math.nan)) for g in (sound, other)]
    engine = PlainEngine(tiny_policy())
    update(engine, lost, config)
    update(engine, [sound, lost[1]], config)
    assert engine.held == [True, False]


def test_a_step_is_held_only_where_nothing_in_it_is_left() -> None:
    def held(lost_step: int, **learner: Any) -> list[bool]:
        config = tiny_config(
            "g2rpo",
            g2rpo={"sde_steps": [0, 1]},
            advantage={"on_invalid": "drop_group"},
            learner=learner,
        )
        (group,) = draw_groups(config, count=1)
        group.rewards[:, :, lost_step] = math.nan
        engine = PlainEngine(tiny_policy())
        update(engine, [group], config)
        return engine.held

    assert held(0, steps_per_pass=2) == held(1, steps_per_pass=2) == [False]
    assert held(1, update="per_sde_step") == [False, True]


def test_a_dropped_group_adds_no_kl_either() -> None:
    config = tiny_config(
        "g2rpo",
        model={"lora": {"rank": 2}},
        # So that its gradient is as large as the policy's.
        learner={"kl_weight": 1e3},
        advantage={"on_invalid": "drop_group"},
    )
    sound, other = draw_groups(config, policy=moved_policy())
    dropped = replace(other, rewards=torch.full_like(other.rewards, math.nan))
    both = gradient_of(config, [sound, dropped], moved_policy())
    assert_same_gradient(both, gradient_of(config, [sound], moved_policy()) / 2)


def _break_a_block(policy: Policy, *, reference_only: bool = False) -> None:
    """Let the activations of the first latents of every pass overflow inside the network."""

    def overflow(_block: Any, _arguments: Any, outputs: tuple[Tensor, Tensor]) -> Any:
        if reference_only and torch.is_grad_enabled():
            return outputs
        text, picture = outputs
        scale = torch.ones(len(picture), 1, 1)
        scale[0] = 1e30
        return text, picture * scale * scale

    policy.transformer.transformer_blocks[0].register_forward_hook(overflow)


@pytest.mark.parametrize("on_invalid", ["drop_group", "stop"])
@pytest.mark.parametrize(
    ("algorithm", "who"), [("flow_grpo", "member 0"), ("g2rpo", "all members")]
)
def test_an_overflow_inside_the_network_stops_before_the_weights_are_lost(
    algorithm: str, who: str, on_invalid: str
) -> None:
    config = tiny_config(algorithm, advantage={"on_invalid": on_invalid})
    groups = draw_groups(config, count=1)
    engine = PlainEngine(tiny_policy())
    _break_a_block(engine.policy)
    with pytest.raises(LearnerError) as caught:
        update(engine, groups, config)
    message = str(caught.value)
    assert "group 0, prompt 'prompt 0', SDE step 0: the network's prediction for " in message
    assert f"{who} is not finite" in message
    assert (engine.ended, engine.gradients) == ([], [])


def test_an_overflow_of_the_reference_stops_the_same_way() -> None:
    config = tiny_config("g2rpo", model={"lora": {"rank": 2}}, learner={"kl_weight": 1.0})
    groups = draw_groups(config, count=1, policy=moved_policy())
    engine = PlainEngine(moved_policy())
    _break_a_block(engine.policy, reference_only=True)
    with pytest.raises(LearnerError, match="prediction for all members is not finite"):
        update(engine, groups, config)
    assert (engine.ended, engine.gradients) == ([], [])


def _with_a_member_far_away(config: Config) -> RolloutGroup:
    """Member 1 went from x_k to where the density under the new weights is zero in float32."""
    group = draw_groups(config, count=1)[0]
    velocities = group.velocities.clone()
    velocities[:, 1] = 1e30
    return replace(group, velocities=velocities)


def test_members_with_an_infinite_log_probability_are_masked_and_counted() -> None:
    config = tiny_config("flow_grpo", advantage={"on_invalid": "drop_group"})
    report = update(PlainEngine(tiny_policy()), [_with_a_member_far_away(config)], config)
    assert {record.masked_members for record in report.records} == {1}
    assert all(math.isfinite(record.loss) for record in report.records)
    assert math.isfinite(report.grad_norms[0])
    assert report.grad_norms[0] > 0
    # Of the others alone: none of them has moved yet, and one of four would pull the mean.
    assert {record.health.ratio_mean for record in report.records} == {1.0}
    assert all(record.valid for record in report.records)


def test_health_is_that_of_the_members_left_alone() -> None:
    config = tiny_config("flow_grpo", advantage={"on_invalid": "drop_group"})
    group = _with_a_member_far_away(config)
    # All others were drawn by somewhat other weights.
    others = [0, 2, 3]
    group.velocities[:, others] += 0.01
    report = update(PlainEngine(tiny_policy()), [group], config)
    alone = draw_groups(config, count=1)[0]
    alone.velocities[:] += 0.01
    expected = update(PlainEngine(tiny_policy()), [alone], config)
    for left, whole in zip(report.records, expected.records, strict=True):
        assert left.masked_members == 1
        assert left.health.max_abs_log_ratio > 0
        assert left.health.max_abs_log_ratio <= whole.health.max_abs_log_ratio
        # With a fourth ratio of exactly 1 the mean would be a quarter closer to 1.
        assert abs(left.health.ratio_mean - 1) > 0.8 * abs(whole.health.ratio_mean - 1)


def test_a_group_without_a_member_left_is_not_trained_on() -> None:
    config = tiny_config("flow_grpo", advantage={"on_invalid": "drop_group"})
    group = draw_groups(config, count=1)[0]
    group = replace(group, velocities=torch.full_like(group.velocities, 1e30))
    report = update(PlainEngine(tiny_policy()), [group], config)
    assert not any(record.valid for record in report.records)
    assert not report.taught


def test_a_group_without_any_reward_stops_nothing_by_its_ratios() -> None:
    config = tiny_config("flow_grpo", rewards={"oracle": {"kind": "oracle", "required": False}})
    group = _with_a_member_far_away(config)
    group.rewards[:] = math.nan
    report = update(PlainEngine(tiny_policy()), [group], config)
    assert {record.masked_members for record in report.records} == {1}
    assert not report.taught


def test_an_infinite_log_probability_stops_the_run_where_that_is_configured() -> None:
    config = tiny_config("flow_grpo")
    with pytest.raises(LearnerError, match="1 of 4 members is not finite"):
        update(PlainEngine(tiny_policy()), [_with_a_member_far_away(config)], config)
