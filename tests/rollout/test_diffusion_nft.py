"""DiffusionNFT: draws, loss and gradient against the formula in float64, and the old policy."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.config import Config
from g2rpo_ray.learner.update import UpdateReport, update_on_groups
from g2rpo_ray.maths.forward_process import implicit_policies_loss, optimality
from g2rpo_ray.maths.noise import normal
from g2rpo_ray.sampling.group import RolloutGroup
from g2rpo_ray.training.collect import update_metrics
from tests.rollout.tiny import PlainEngine, draw_group, tiny_config, tiny_policy, tiny_sampler

CPU = torch.device("cpu")


def nft(**sections: dict[str, Any]) -> Config:
    recipe = {"times_per_picture": 3, "beta": 0.4} | sections.pop("diffusion_nft", {})
    return tiny_config("diffusion_nft", diffusion_nft=recipe, **sections)


def update(engine: PlainEngine, groups: list[RolloutGroup], config: Config) -> UpdateReport:
    return update_on_groups(
        engine,  # type: ignore[arg-type]
        groups,
        [1.0] * len(groups),
        config=config,
        prompts=len(groups),
        ranks=1,
        device=CPU,
    )


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def test_pictures_are_the_odes_and_times_the_schedules() -> None:
    config, policy = nft(), tiny_policy()
    group = draw_group(policy, config)
    sampler = tiny_sampler(policy, config)
    start = group.key.member_noise(policy.shape.packed, 4, shared=False)
    assert torch.equal(group.latents[0], sampler.trajectory(start, group.prompt.embeds).x0)
    assert group.times is not None
    assert group.times.shape == (3, 4)
    above_zero = set(sampler.sigmas[:-1].float().tolist())
    for of_member in group.times.T.tolist():
        assert len(set(of_member)) == 3
        assert set(of_member) <= above_zero
    assert len({tuple(t) for t in group.times.T.tolist()}) > 1
    # What the learner makes again is what the old policy saw.
    for position in range(3):
        noised, target = group.noised(position)
        noise = torch.stack(
            [normal(policy.shape.packed, 0, 0, "branch", position, m) for m in range(4)]
        )
        t = group.times[position][:, None, None]
        assert torch.equal(noised, (1 - t) * group.latents[0] + t * noise)
        assert torch.equal(target, noise - group.latents[0])
        velocity = sampler.exact(noised, group.times[position], group.prompt.embeds)
        assert torch.equal(group.velocities[position], velocity)


def test_evaluations_are_those_that_the_counts_say() -> None:
    config, policy = nft(), tiny_policy()
    seen: list[int] = []
    policy.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    group = draw_group(policy, config)
    counts = make_algorithm(config).counts(0)
    assert sum(seen) == group.evaluations == counts.evaluations == 4 * (6 + 3)
    assert group.rewards.shape[-1] == counts.pictures == 4
    seen.clear()
    update(PlainEngine(policy), [group], config)
    assert sum(seen) == counts.learner_passes == 4 * 3
    assert max(seen) <= 3


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_loss_and_its_gradient_are_the_papers(adaptive: bool) -> None:
    """By numbers, and by differences of them, in float64; the weight has no gradient."""
    generator = torch.Generator().manual_seed(0)
    v, old, target = (
        torch.randn(3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    times, r, beta = (
        torch.tensor([0.2, 0.7, 1.0]).double(),
        torch.tensor([0.0, 0.3, 1.0]).double(),
        0.4,
    )

    def by_hand(v: Tensor, weights_of: Tensor) -> float:
        total = 0.0
        for m in range(3):
            t = float(times[m])
            for share, sign in ((float(r[m]), 1), (1 - float(r[m]), -1)):
                implicit = (1 - sign * beta) * old[m] + sign * beta * v[m]
                squares = [float(e) ** 2 for e in (implicit - target[m]).flatten()]
                if adaptive:
                    at = (1 - sign * beta) * old[m] + sign * beta * weights_of[m]
                    # x_0 that is predicted, and the true one: their difference is t times v's.
                    sizes = [abs(t * float(e)) for e in (at - target[m]).flatten()]
                    squares = [t * t * s * len(sizes) / sum(sizes) for s in squares]
                total += share * sum(squares) / len(squares) / beta
        return total

    v.requires_grad_()
    losses = implicit_policies_loss(v, old, target, times, r, beta, adaptive=adaptive)
    assert float(losses.sum().detach()) == pytest.approx(by_hand(v.detach(), v.detach()), rel=1e-12)
    losses.sum().backward()
    assert v.grad is not None
    for place in ((0, 0, 0), (1, 3, 2), (2, 1, 4)):
        step = torch.zeros_like(v)
        step[place] = 1e-6
        up, down = (by_hand((v + s).detach(), v.detach()) for s in (step, -step))
        assert float(v.grad[place]) == pytest.approx((up - down) / 2e-6, rel=1e-5)


def test_optimality_is_a_half_of_no_advantage_and_ends_at_the_clamp() -> None:
    assert optimality(torch.tensor([-5.0, 0.0, 2.5, 5.0]), 5.0).tolist() == [0.0, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_at_the_old_policy_the_gradient_is_the_advantages_whatever_beta(beta: float) -> None:
    """So the update's gradient there is that of mean(A (v_old - target) . v), worked by hand."""
    config = nft(diffusion_nft={"beta": beta, "adaptive_weight": False})
    policy = tiny_policy()
    group = draw_group(policy, config)
    engine = PlainEngine(policy, learning_rate=0.0)
    update(engine, [group], config)
    rewards = group.rewards[0, 0, 0].double()
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    assert group.times is not None
    total = torch.zeros(())
    for position in range(3):
        noised, target = group.noised(position)
        v = policy(noised, group.times[position], group.prompt.embeds)
        assert torch.allclose(v, group.velocities[position], atol=1e-5)
        pull = 2 * advantages[:, None, None].float() * (v.detach() - target)
        total = total + (pull * v).mean() / 3
    total.backward()
    expected = {n: p.grad for n, p in policy.transformer.named_parameters() if p.grad is not None}
    found, wanted = flat(engine.gradients[0]), flat(expected)
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("adaptive", [False, True])
def test_away_from_the_old_policy_the_updates_loss_is_the_papers(adaptive: bool) -> None:
    config = nft(diffusion_nft={"adaptive_weight": adaptive})
    group = draw_group(tiny_policy(), config)
    policy = tiny_policy()
    with torch.no_grad():
        policy.transformer.proj_out.weight.mul_(1.5)
    records = update(PlainEngine(policy, learning_rate=0.0), [group], config).records
    rewards = group.rewards[0, 0, 0].double()
    r = 0.5 + (rewards - rewards.mean()) / (rewards.std() + 1e-8) / 10
    assert group.times is not None
    for position, record in enumerate(records):
        noised, target = group.noised(position)
        t = group.times[position].double()
        with torch.no_grad():
            v = policy(noised, group.times[position], group.prompt.embeds).double()
        old = group.velocities[position].double()
        assert float((v - old).abs().mean()) > 0.1
        total = 0.0
        for share, implicit in ((r, 0.6 * old + 0.4 * v), (1 - r, 1.4 * old - 0.4 * v)):
            # Of the clean picture, which is what the paper's weight is of.
            clean = noised.double() - t[:, None, None] * implicit
            error = clean - group.latents[0].double()
            squares = (error**2).mean(dim=(1, 2)) / error.abs().mean(dim=(1, 2))
            if not adaptive:
                squares = ((implicit - target.double()) ** 2).mean(dim=(1, 2))
            total += float((share * squares).mean())
        assert record.loss == pytest.approx(5 / 0.4 * total, rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_velocity_before_the_first_update_is_the_old_one(batch_size: int) -> None:
    config, policy = nft(rollout={"batch_size": batch_size}), tiny_policy()
    group = draw_group(policy, config)
    # Then both implicit policies are the old one, and r decides nothing.
    worse = replace(group, rewards=-group.rewards)
    losses = [
        [record.loss for record in update(PlainEngine(tiny_policy()), [g], config).records]
        for g in (group, worse)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_an_update_goes_to_good_pictures_and_from_bad_ones() -> None:
    config, policy = nft(), tiny_policy()
    group = draw_group(policy, config)
    gradients = []
    for sign in (1, -1):
        engine = PlainEngine(tiny_policy(), learning_rate=0.0)
        update(engine, [replace(group, rewards=sign * group.rewards)], config)
        gradients.append(flat(engine.gradients[0]))
    assert torch.allclose(gradients[0], -gradients[1], rtol=1e-3, atol=1e-6)
    assert gradients[0].norm() > 0


def test_the_old_policy_moves_once_an_iteration_by_its_share() -> None:
    recipe = {"decay_rate": 0.1, "decay_after": 1, "decay_limit": 0.25}
    config = nft(diffusion_nft=recipe, learner={"updates_per_iteration": 2})
    engine = PlainEngine(tiny_policy())
    for _ in range(3):
        report = update(engine, [draw_group(tiny_policy(), config)], config)
        assert len(report.grad_norms) == 2
    assert engine.old_policy_decays == pytest.approx([0.1, 0.25, 0.25])
    assert [config.diffusion_nft.decay(n) for n in (0, 1)] == [0.0, 0.0]


def test_parts_batches_and_a_broken_picture() -> None:
    whole, policy = nft(), tiny_policy()
    group = draw_group(policy, whole)
    engine = PlainEngine(tiny_policy())
    update(engine, [group], whole)
    halves = PlainEngine(tiny_policy(), learning_rate=0.0)
    update(halves, [replace(group, batch_size=1)], nft(learner={"updates_per_iteration": 2}))
    mean = (flat(halves.gradients[0]) + flat(halves.gradients[1])) / 2
    expected = flat(engine.gradients[0])
    assert (mean - expected).norm() < 1e-4 * expected.norm()
    latents, rewards = group.latents.clone(), group.rewards.clone()
    latents[0, 1] = math.inf
    rewards[..., 1] = math.nan
    config = nft(advantage={"on_invalid": "drop_group"})
    broken = replace(group, latents=latents, rewards=rewards)
    engine = PlainEngine(tiny_policy())
    report = update(engine, [broken], config)
    assert not report.taught
    assert engine.held == [True]
    assert float(flat(engine.gradients[0]).abs().max()) == 0.0


def test_a_picture_at_whose_level_the_old_policy_broke_is_no_input_at_any() -> None:
    config = nft(advantage={"on_invalid": "drop_group"})
    group = draw_group(tiny_policy(), config)
    velocities = group.velocities.clone()
    velocities[1, 2] = math.nan
    engine = PlainEngine(tiny_policy())
    seen: list[Tensor] = []
    engine.policy.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    update(engine, [replace(group, velocities=velocities, batch_size=4)], config)
    for position, x in enumerate(seen):
        noised, _ = group.noised(position)
        assert torch.equal(x[[0, 1, 3]], noised[[0, 1, 3]])
        assert group.times is not None
        noise = normal(engine.policy.shape.packed, 0, 0, "branch", position, 2)
        assert torch.equal(x[2], group.times[position, 2] * noise)


def test_its_numbers_have_no_ratio_and_its_kl_is_of_velocities() -> None:
    config = nft(model={"lora": {"rank": 2}}, learner={"kl_weight": 0.5})
    policy = tiny_policy(lora=True)
    group = draw_group(policy, config)
    engine = PlainEngine(policy, learning_rate=10.0)
    first = update_metrics(update(engine, [group], config))
    assert first["policy/kl_to_reference"] == 0.0
    assert math.isnan(first["policy/ratio_mean"])
    assert math.isnan(first["policy/first_max_abs_log_ratio"])
    assert first["groups/trained"] == 3
    assert update_metrics(update(engine, [group], config))["policy/kl_to_reference"] > 0
