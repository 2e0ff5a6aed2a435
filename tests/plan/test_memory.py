"""Memory of a learner rank against hand-computed values, and which roles share a card."""

import pytest

from g2rpo_ray.config import load_config
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.plan.memory import RESERVE_GIB, learner_memory, rollout_memory
from g2rpo_ray.plan.networks import policy_size
from g2rpo_ray.plan.packing import pack
from tests.plan.test_networks import PAPER

# 11,901,408,320 parameters: 22.168 GiB in bf16, and 12 B each for master weight and moments.
BF16, STATE = 22.168, 133.009


@pytest.mark.parametrize(
    ("stage", "ranks", "weights", "gradients", "state"),
    [
        (1, 1, BF16, BF16, STATE),
        (1, 4, BF16, BF16, 33.252),
        (1, 16, BF16, BF16, 8.313),
        (2, 1, BF16, BF16, STATE),
        (2, 4, BF16, 5.542, 33.252),
        (2, 16, BF16, 1.3855, 8.313),
        (3, 1, BF16, BF16, STATE),
        (3, 4, 5.542, 5.542, 33.252),
        (3, 16, 1.3855, 1.3855, 8.313),
    ],
)
def test_full_fine_tune_of_flux1_dev(
    stage: int, ranks: int, weights: float, gradients: float, state: float
) -> None:
    config = load_config(PAPER, [f"learner.zero_stage={stage}"])
    memory = learner_memory(config, policy_size(config), load_costs().of("H100"), ranks, rows=1)
    parts = memory.parts_gib
    assert parts["weights"] == pytest.approx(weights, rel=1e-3)
    assert parts["gradients"] == pytest.approx(gradients, rel=1e-3)
    assert parts["fp32 master, moments"] == pytest.approx(state, rel=1e-3)
    assert parts["buckets"] == pytest.approx(0.931, rel=1e-3)  # 5e8 gradients in bf16
    assert parts.get("gathered weights", 0) == pytest.approx(
        1.863 if stage == 3 and ranks > 1 else 0, rel=1e-3
    )
    assert memory.total_gib == pytest.approx(sum(parts.values()))
    assert parts["reserve"] == RESERVE_GIB


def test_lora_keeps_the_base_frozen() -> None:
    config = load_config(PAPER, ["model.lora={rank: 64}", "learner.zero_stage=2"])
    size = policy_size(config)
    parts = learner_memory(config, size, load_costs().of("H100"), ranks=2, rows=1).parts_gib
    assert parts["weights"] == pytest.approx(BF16 + 0.487, rel=1e-3)  # 261 M adapters
    assert parts["fp32 master, moments"] == pytest.approx(261_488_640 * 6 / 2**30)


def test_activations_scale_from_the_measured_ones() -> None:
    costs = load_costs().of("H100")
    measured = max(costs.measured("evaluation"), key=lambda point: point.batch)
    assert measured.activations_gib is not None
    size = policy_size(load_config(PAPER))
    batches = [measured.batch, 8 * measured.batch]
    activations = [
        rollout_memory(
            load_config(PAPER, [f"rollout.batch_size={batch}", "rollout.decode_batch_size=1"]),
            size,
            costs,
        ).parts_gib["activations"]
        for batch in batches
    ]
    assert activations == pytest.approx(
        [measured.activations_gib, 8 * measured.activations_gib], rel=1e-3
    )


def test_pack_puts_small_shares_beside_large_ones() -> None:
    assert pack([("a", 0.1), ("w", 0.9), ("l", 1.0), ("w", 0.9), ("cpu", 0.0)]) == [
        ["l"],
        ["w", "a"],
        ["w"],
    ]
    assert pack([("two", 2.0), ("half", 0.5)]) == [["two"], ["two"], ["half"]]
