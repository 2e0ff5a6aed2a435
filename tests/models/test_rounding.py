"""What is left of an update in rounded weights, against values that can be counted by hand."""

import pytest
import torch
from torch import Tensor, nn

from g2rpo_ray.config import LoraSection
from g2rpo_ray.models.rounding import Arrived, Rounding, rounded
from g2rpo_ray.models.saving import merge_adapters

STEP = 2**-7
"""Between neighbouring bfloat16 numbers from 1 to 2."""


def arrived_of(before: Tensor, update: Tensor, rounding: Rounding = "nearest") -> Arrived:
    arrived, meant = Arrived(), before + update
    arrived.add(before, meant, rounded(meant, torch.bfloat16, rounding, 7))
    return arrived


@pytest.mark.parametrize(
    ("update", "changed", "share"),
    [(STEP / 4, 0, 0.0), (STEP, 100, 1.0), (STEP * 3 / 4, 100, 4 / 3)],
)
def test_to_the_nearest_an_update_arrives_whole_or_not_at_all(
    update: float, changed: int, share: float
) -> None:
    arrived = arrived_of(torch.ones(100), torch.full((100,), update))
    assert (arrived.weights, arrived.changed) == (100, changed)
    assert arrived.share == pytest.approx(share)
    assert arrived.cosine == pytest.approx(float(changed > 0))
    assert arrived.is_lost == (changed == 0)


def test_tensors_add_up_and_say_what_they_are() -> None:
    # The first is lost; of the second, as long, all arrives.
    arrived = arrived_of(torch.ones(100), torch.full((100,), STEP / 4))
    meant = torch.full((300,), 1 + STEP / 4)
    arrived.add(torch.ones(300), meant, meant)
    assert arrived.share == pytest.approx(0.75)
    assert arrived.cosine == pytest.approx(0.75**0.5)
    assert str(arrived) == (
        "75.0% of the trained update arrived, cosine 0.866: 75.0% of 400 weights changed"
    )
    assert arrived.is_lost


def test_nothing_trained_is_nothing_lost() -> None:
    for arrived in (Arrived(), arrived_of(torch.ones(5), torch.zeros(5))):
        assert (arrived.share, arrived.cosine, arrived.is_lost) == (1.0, 0.0, False)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_by_chance_the_mean_is_right(sign: float) -> None:
    count = 100_000
    meant = sign * torch.full((count,), 1 + STEP / 4)
    found = rounded(meant, torch.bfloat16, "stochastic", 7)
    assert set(found.float().unique().tolist()) == {sign, sign * (1 + STEP)}
    # Four standard errors of a chance of 1/4.
    moved = (found.float().abs() > 1).float().mean()
    assert abs(float(moved) - 0.25) < 4 * (0.25 * 0.75 / count) ** 0.5
    arrived = arrived_of(
        sign * torch.ones(count), sign * torch.full((count,), STEP / 4), "stochastic"
    )
    assert arrived.share == pytest.approx(1.0, abs=0.03)
    assert arrived.cosine == pytest.approx(0.5, abs=0.02)
    assert not arrived.is_lost


def test_by_chance_is_by_seed_and_leaves_bfloat16_numbers() -> None:
    meant = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    first, again, other = (rounded(meant, torch.bfloat16, "stochastic", s, "a") for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, 3.0e38]).bfloat16()
    assert torch.equal(rounded(special.float(), torch.bfloat16, "stochastic", 1), special)
    assert rounded(meant, torch.float32, "stochastic", 1) is meant


@pytest.mark.parametrize(
    ("rounding", "dtype", "share", "changed", "cosine"),
    [
        ("nearest", torch.bfloat16, 0.53, 0.22, 0.64),
        ("stochastic", torch.bfloat16, 1.0, 0.31, 0.52),
        ("nearest", torch.float32, 1.0, 1.0, 1.0),
    ],
)
def test_an_adapter_a_thousandth_of_the_weights_merged(
    rounding: Rounding, dtype: torch.dtype, share: float, changed: float, cosine: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    net = nn.Module()
    net.l = nn.Linear(512, 512, bias=False)
    net.l.weight.data = (torch.randn(512, 512, generator=generator) * 0.02).bfloat16().to(dtype)
    before = net.l.weight.detach().float().clone()
    a = torch.randn(16, 512, generator=generator)
    b = torch.randn(512, 16, generator=generator) / 4 * 0.02 * 1e-3
    weights = {"l.lora_A.default.weight": a, "l.lora_B.default.weight": b / 2}
    arrived = merge_adapters(net, weights, LoraSection(rank=16, alpha=32), rounding, seed=3)
    update, moved = b @ a, net.l.weight.detach().float() - before
    assert arrived.share == pytest.approx(float((update * moved).sum() / update.square().sum()))
    assert arrived.changed == int(moved.count_nonzero())
    assert arrived.share == pytest.approx(share, abs=0.02)
    assert arrived.changed / arrived.weights == pytest.approx(changed, abs=0.01)
    assert arrived.cosine == pytest.approx(cosine, abs=0.01)
