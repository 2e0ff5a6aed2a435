"""A frozen base in 8 bits is one function, wherever and however it is computed."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from g2rpo_ray.models.fp8 import Float8Linear, Float8Twin
from g2rpo_ray.models.frozen_float8 import FrozenFloat8Linear, block_linears
from g2rpo_ray.models.kernels import compile_blocks
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.sharing import lend
from g2rpo_ray.models.weights import trainable_parameters
from tests.models.families.folders import TINY, family_config
from tests.models.interpreted import interpreted
from tests.tiny import encode, equal_weights, tiny_config

EIGHT = ("model.lora.rank=2", "model.frozen_dtype=float8")


def layer_of(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> FrozenFloat8Linear:
    linear = nn.Linear(len(rows[0]), len(rows), dtype=dtype).requires_grad_(False)
    linear.weight.copy_(torch.tensor(rows, dtype=dtype))
    return FrozenFloat8Linear(linear, "cpu")


def test_each_channel_is_rounded_by_its_own_power_of_two() -> None:
    layer = layer_of([[1.0, -2.0, 0.3], [1000.0, 50.0, -25.0], [0.0, 0.0, 0.0], [440, 3, 1]])
    # The least powers of two by which the largest number of a channel stays below 448.
    assert layer.scale.flatten().tolist() == [2.0**-7, 4.0, 1.0, 1.0]
    # Three bits of mantissa: 0.3 lies between 0.28125 and 0.3125.
    assert layer.weight[0].tolist() == [1.0, -2.0, 0.3125]
    # From 512 on steps are 64, of 50 and of 25 two are as near: the even one.
    assert layer.weight[1].tolist() == [1024.0, 48.0, -24.0]
    assert layer.weight[2].tolist() == [0.0, 0.0, 0.0]


def test_casting_and_products_round_no_weight() -> None:
    rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)).tolist()
    layer = layer_of(rows)
    exact = layer.weight
    low = copy.deepcopy(layer).bfloat16()
    assert low.weight.dtype == torch.bfloat16
    assert torch.equal(low.weight.float(), exact)
    assert layer_of(rows, torch.bfloat16).bits.dtype == torch.uint8
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = layer(x)
    assert torch.equal(y, nn.functional.linear(x, exact, layer.bias))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * y.detach() @ exact)


def unlike_widened(device: str) -> list[int]:
    """Numbers that the card's kernel makes others than PyTorch, for all of float8 e4m3 under the
    scales that weights have, in columns that fill no block, in each dtype of computing."""
    from g2rpo_ray.models.widening import widen

    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    bits = numbers[(numbers & 127) < 127].repeat(5)[None, :1100].repeat(60, 1)
    powers = torch.ldexp(
        torch.ones(60, 1, device=device), torch.arange(-40, 20)[:, None].to(device)
    )
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        expected = bits.view(torch.float8_e4m3fn).to(dtype).mul_(powers.to(dtype))
        ours = widen(bits, powers.to(dtype))
        assert ours.dtype == dtype
        found.append(int((ours.view(torch.uint8) != expected.view(torch.uint8)).sum()))
    return found


@pytest.mark.slow
def test_the_cards_kernel_widens_to_the_same_bits() -> None:
    pytest.importorskip("triton", reason="PyTorch for CPUs alone comes without Triton")
    code = "from tests.models.test_frozen_float8 import unlike_widened as f; print(f('cpu'))"
    assert interpreted(code, timeout_s=300) == [0, 0]


@pytest.mark.gpu
def test_a_card_widens_to_the_same_bits() -> None:
    assert unlike_widened("cuda") == [0, 0]


def saved_bytes(policy: Policy, x: Tensor, embeds: object) -> tuple[Tensor, int]:
    """A velocity, and the bytes of weights that autograd saved for its gradients."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and tensor.is_floating_point() and not tensor.requires_grad:
            kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        velocity = policy(x, torch.tensor([1.0, 0.4]), embeds)
    return velocity, sum(kept.values())


# Compiled in one family: the product is one operation there, too.
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in TINY), pytest.param("flux1_dev", True, marks=pytest.mark.long)],
)
def test_rollout_and_learner_compute_the_same_bits_in_less_memory(
    name: str, compiled: bool
) -> None:
    config = family_config(name, *EIGHT)
    (prompt,) = encode(config)[:1]
    rollout, learner = load_policy(config), load_policy(config)
    plain = load_policy(family_config(name, "model.lora.rank=2"))
    learner.transformer.enable_gradient_checkpointing()
    learner.train()
    if compiled:
        compile_blocks(rollout, cache=None, trained=False)
        compile_blocks(learner, cache=None)
    x = torch.randn(2, *rollout.shape.packed, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.4])
    with torch.no_grad():
        drawn = rollout(x, sigma, prompt.embeds)
        exact = plain(x, sigma, prompt.embeds)
    velocity = learner(x, sigma, prompt.embeds)
    if compiled:
        torch.testing.assert_close(drawn, velocity, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(drawn, velocity)
    assert 0 < float((drawn - exact).norm() / exact.norm()) < 0.1
    velocity.square().sum().backward()
    assert sum(p.grad is not None for p in trainable_parameters(learner).values()) > 2
    # A byte a weight instead of four, and a number a channel.
    rounded = [m for m in rollout.modules() if isinstance(m, FrozenFloat8Linear)]
    of_family = block_linears(load_policy(family_config(name)).transformer, plain.family.blocks)
    linears = [linear for *_, linear in of_family]
    assert len(rounded) == len(linears) > 10
    saved = sum(3 * m.weight.numel() - 4 * len(m.weight) for m in linears)
    assert held(plain) - held(rollout) == saved
    assert trainable_parameters(rollout).keys() == trainable_parameters(plain).keys()
    assert {p.dtype for p in trainable_parameters(rollout).values()} == {torch.float32}


def held(policy: Policy) -> int:
    return sum(t.nbytes for t in (*policy.parameters(), *policy.buffers()))


def test_widened_weights_are_not_kept_for_the_backward_pass() -> None:
    config = family_config("flux1_dev", *EIGHT)
    plain = load_policy(family_config("flux1_dev", "model.lora.rank=2"))
    (prompt,) = encode(config)[:1]
    x = torch.randn(2, *plain.shape.packed, generator=torch.Generator().manual_seed(0))
    rounded = load_policy(config)
    saved = [saved_bytes(policy, x, prompt.embeds)[1] for policy in (plain, rounded)]
    assert saved[1] < saved[0] / 4


def test_a_shared_base_is_the_same_bits(tmp_path: Path) -> None:
    policy = load_policy(tiny_config(tmp_path, *EIGHT))
    state = {name: t.clone() for name, t in policy.transformer.state_dict().items()}
    opened = lend(policy.transformer, torch.device("cpu")).open()
    assert equal_weights(opened.state_dict(), state)
    assert sum(name.endswith(".bits") for name in state) > 30


def test_the_8_bit_twin_of_an_8_bit_base_has_its_adapters(tmp_path: Path) -> None:
    policy = load_policy(tiny_config(tmp_path, *EIGHT))
    twin = Float8Twin(policy)
    (prompt,) = encode(tiny_config(tmp_path))[:1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *policy.shape.packed, generator=generator)
    arguments = x, torch.tensor([1.0, 0.4]), prompt.embeds
    assert sum(isinstance(m, Float8Linear) for m in twin.policy.modules()) == 34
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        exact, stale = policy(*arguments), twin.policy(*arguments)
        twin.refresh()
        rough = twin.policy(*arguments)
    assert 0 < 3 * float((rough - exact).norm()) < float((stale - exact).norm())
