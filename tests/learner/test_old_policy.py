"""The old policy of DiffusionNFT, and updates on parts of the members, on real DeepSpeed ranks."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.models.weights import receipt, word_sums
from g2rpo_ray.sampling.group import RolloutGroup
from tests.learner.rank_groups import (
    FEW_ADAPTERS,
    ROUNDING,
    Ranks,
    part,
    relative_error,
    small_config,
)
from tests.tiny import draw_groups, encode, equal_weights

NFT = [
    "algorithm=diffusion_nft",
    "diffusion_nft.times_per_picture=2",
    "diffusion_nft.decay_rate=0.25",
    "learner.update=per_iteration",
]
LORA = [*FEW_ADAPTERS, "learner.learning_rate=1e-3"]


@pytest.fixture(scope="module", params=["full", "lora"])
def settings(request: pytest.FixtureRequest) -> list[str]:
    return NFT + (LORA if request.param == "lora" else [])


@pytest.fixture(scope="module")
def groups(settings: list[str], run_dir: Path) -> list[RolloutGroup]:
    config = small_config(run_dir, *settings)
    return draw_groups(config, encode(config))


def drawing(ranks: Ranks) -> Mapping[str, Tensor]:
    """The weights that the workers would get, the same on every rank."""
    sent, packed = ranks.call("export_weights", 1)[0]
    assert len(set(ranks.call("checksum"))) == 1
    weights: Mapping[str, Tensor] = packed
    assert receipt(1, weights) == sent
    # And what a broadcast would send adds up to them.
    shards = ranks.call("shard_sums")
    whole = word_sums([weights[name].view(-1) for name in sorted(weights)])
    assert shards[0] == whole or [sum(s) % 2**64 for s in zip(*shards, strict=True)] == [
        w % 2**64 for w in whole
    ]
    return weights


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_the_old_policy_is_the_average_on_any_number_of_ranks(
    ranks: dict[int, Ranks], settings: list[str], groups: list[RolloutGroup], stage: int
) -> None:
    olds = []
    for group in ranks.values():
        group.start(*settings, f"learner.zero_stage={stage}")
        trained = [part(group.state(), "weight.")]
        assert torch.equal(part(group.state(), "ema."), trained[0])
        for _ in range(2):
            group.update(groups[:3])
            trained.append(part(group.state(), "weight."))
        # A quarter of itself after the first update, a half after the second.
        expected = 0.5 * (0.25 * trained[0] + 0.75 * trained[1]) + 0.5 * trained[2]
        old = part(group.state(), "ema.")
        torch.testing.assert_close(old, expected, rtol=0, atol=1e-6)
        weights = drawing(group)
        assert torch.equal(torch.cat([weights[n].flatten() for n in sorted(weights)]), old)
        olds.append(old)
    assert relative_error(olds[1], olds[0]) < ROUNDING


# In CI one rank continues without an old policy (test_ranks), and two with it, of stage 2, too.
@pytest.mark.parametrize(
    ("count", "stage"), [pytest.param(1, 2, marks=pytest.mark.long), (2, 2), (2, 3)]
)
def test_a_checkpoint_continues_to_the_bit(
    ranks: dict[int, Ranks],
    settings: list[str],
    groups: list[RolloutGroup],
    tmp_path: Path,
    count: int,
    stage: int,
) -> None:
    overrides = [*settings, f"learner.zero_stage={stage}"]
    checkpoint = tmp_path / "run" / "checkpoints" / "iteration_000001"
    ranks[count].start(*overrides)
    ranks[count].update(groups[:2])
    ranks[count].save(checkpoint, CheckpointInfo(1, 1, 1, 1, 1.0, "nft", 0))
    drew = drawing(ranks[count])
    ranks[count].update(groups[2:])
    uninterrupted = ranks[count].state()
    ranks[count].start(*overrides, checkpoint=checkpoint)
    assert equal_weights(drawing(ranks[count]), drew)
    ranks[count].update(groups[2:])
    assert equal_weights(ranks[count].state(), uninterrupted)


def test_an_old_policy_in_bfloat16_is_rounded_from_its_own_float32(
    ranks: dict[int, Ranks], run_dir: Path
) -> None:
    overrides = [*NFT, "model.dtype=bfloat16", "learner.learning_rate=1e-5"]
    config = small_config(run_dir, *overrides)
    groups = draw_groups(config, encode(config)[:2])
    for group in ranks.values():
        group.start(*overrides)
        group.update(groups)
        group.update(groups)
        weights, state = drawing(group), group.state()
        assert {w.dtype for w in weights.values()} == {torch.bfloat16}
        for name, weight in weights.items():
            expected = state[f"ema.{name}"].to(torch.bfloat16)
            assert torch.equal(weight.flatten(), expected)


@pytest.mark.parametrize("algorithm", ["g2rpo", "mix_grpo", "diffusion_nft"])
def test_updates_on_parts_of_the_members_depend_on_no_ranks(
    ranks: dict[int, Ranks], run_dir: Path, algorithm: str
) -> None:
    overrides = [
        *NFT,
        f"algorithm={algorithm}",
        "mix_grpo.window=2",
        "learner.updates_per_iteration=2",
    ]
    config = small_config(run_dir, *overrides)
    groups = draw_groups(config, encode(config)[:3])
    states, norms = [], []
    for group in ranks.values():
        group.start(*overrides)
        reports = group.update(groups)
        norms.append(reports[0].grad_norms)
        states.append(group.state())
    assert len(norms[0]) == 2
    # The second update's gradient is of weights that AdamW has moved by the sign of the first.
    assert norms[1][0] == pytest.approx(norms[0][0], rel=ROUNDING)
    assert norms[1][1] == pytest.approx(norms[0][1], rel=1e-3)
    assert relative_error(part(states[1], "weight."), part(states[0], "weight.")) < ROUNDING
