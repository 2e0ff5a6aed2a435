"""A rollout's adapted layers in compiled code against peft's."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from g2rpo_ray.models.adapted import adapted_products, sum_in_products
from g2rpo_ray.models.fp8 import Float8Twin
from g2rpo_ray.models.kernels import undo_compilation
from g2rpo_ray.models.policy import Policy, load_policy
from tests.models.families.folders import family_config
from tests.tiny import encode


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 0.008)])
def test_products_of_several_layers(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=dtype)
    weights = [torch.randn(out, 16, dtype=dtype) for out in (24, 8)]
    biases = [torch.randn(24, dtype=dtype), None]
    downs = [torch.randn(rank, 16, dtype=dtype) for rank in (4, 2)]
    ups = [torch.randn(out, rank, dtype=dtype) for out, rank in ((24, 4), (8, 2))]
    scales = [2.0, 0.5]
    found = adapted_products(x, weights, biases, downs, ups, scales)
    for y, w, b, a, up, scale in zip(found, weights, biases, downs, ups, scales, strict=True):
        bias = None if b is None else b.double()
        expected = linear(x.double(), w.double(), bias)
        expected = expected + scale * (x.double() @ a.double().T) @ up.double().T
        assert y.dtype == dtype
        assert y.shape == expected.shape
        assert (y.double() - expected).abs().max() < error * expected.abs().max()


def test_the_operation_is_what_compilers_are_told() -> None:
    x, weight, down = (torch.randn(n, 8) for n in (3, 6, 2))
    arguments = (x, [weight], [torch.randn(6)], [down], [torch.randn(6, 2)], [2.0])
    found = torch.library.opcheck(adapted_products, arguments)
    assert set(found.values()) == {"SUCCESS"}


class Seen:
    """A compiler that counts the layers of every operation and computes as traced."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if "adapted_products" in str(node.target):
                self.layers.append(len(node.args[1]))
        return graph.forward


def changed(policy: Policy) -> None:
    """Weights with which adapters do something, written in place."""
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn_like(weight))


def velocity(policy: Policy, prompt: Any) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(3, *policy.shape.packed)
    with torch.no_grad():
        answer: Tensor = policy(x, torch.tensor([1.0, 0.5, 0.1]), prompt.embeds)
    return answer


@pytest.mark.parametrize("name", ["flux2_klein", "z_image"])
def test_compiled_networks_are_those_of_peft(name: str) -> None:
    config = family_config(name, "model.lora.rank=2")
    (prompt,) = encode(config, ["a red circle"])
    policy = load_policy(config)
    torch.manual_seed(0)
    changed(policy)
    expected = velocity(policy, prompt)
    sum_in_products(policy.transformer)
    assert torch.equal(velocity(policy, prompt), expected)
    seen = Seen()
    for _, block in policy.blocks():
        block.compile(backend=seen, fullgraph=True)
    ours = velocity(policy, prompt)
    adapted = sum(hasattr(m, "base_layer") for _, b in policy.blocks() for m in b.modules())
    assert sum(seen.layers) >= adapted > 0
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    # Weights that are written in place are those that are computed with.
    changed(policy)
    compiled = velocity(policy, prompt)
    undo_compilation(policy)
    assert not torch.equal(compiled, ours)
    torch.testing.assert_close(compiled, velocity(policy, prompt), rtol=1e-4, atol=1e-4)


def test_a_twin_and_layers_in_8_bits_stay_as_they_are() -> None:
    lora = ("model.lora.rank=2", "model.frozen_dtype=float8")
    rounded = load_policy(family_config("flux1_dev", *lora))
    sum_in_products(rounded.transformer)
    policy = load_policy(family_config("flux1_dev", *lora[:1]))
    twin = Float8Twin(policy)
    sum_in_products(twin.policy.transformer)
    for other in (rounded, twin.policy):
        assert not any("forward" in vars(m) for _, b in other.blocks() for m in b.modules())
    sum_in_products(policy.transformer)
    assert any("forward" in vars(m) for _, b in policy.blocks() for m in b.modules())
