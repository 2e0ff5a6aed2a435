"""The rollout's own kernels against diffusers' blocks: by Triton's interpreter, and on a card."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import Tensor

pytest.importorskip("triton", reason="PyTorch for CPUs alone comes without Triton")

from g2rpo_ray.models.flux1.fused import FusedAttnProcessor
from g2rpo_ray.models.fused import gelu
from tests.models.interpreted import interpreted


def differences(
    double: bool, heads: int, head_dim: int, image_tokens: int, text_tokens: int, device: str
) -> list[float]:
    """Largest differences of our attention's results from diffusers', relative to the largest."""
    torch.manual_seed(0)
    channels, dtype = heads * head_dim, torch.float32 if device == "cpu" else torch.bfloat16
    attention = FluxAttention(
        query_dim=channels,
        heads=heads,
        dim_head=head_dim,
        added_kv_proj_dim=channels if double else None,
        out_dim=channels,
        bias=True,
        pre_only=not double,
        eps=1e-6,
        processor=FluxAttnProcessor(),
    )
    for name, parameter in attention.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)
    attention = attention.to(device, dtype)
    image = torch.randn(2, image_tokens, channels, device=device, dtype=dtype)
    text = torch.randn(2, text_tokens, channels, device=device, dtype=dtype) if double else None
    tokens = image_tokens + (text_tokens if double else 0)
    angles = torch.randn(tokens, head_dim // 2, device=device).repeat_interleave(2, dim=1)
    rotary = (angles.cos(), angles.sin())
    with torch.no_grad():
        expected = attention(image, text, image_rotary_emb=rotary)
        ours = FusedAttnProcessor().fused(attention, image, text, None, rotary)
    pairs = zip(ours, expected, strict=True) if double else [(ours, expected)]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def test_gelu_is_the_same_function_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-12, 12, 4001)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    assert torch.equal(gelu(x), expected)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    torch.testing.assert_close(gelu(x), expected, rtol=1e-5, atol=1e-6)
    rounded: Tensor = gelu(x.bfloat16())
    assert rounded.dtype == torch.bfloat16


INTERPRETED = """
import json, torch
from g2rpo_ray.models.adapted import sum_in_products
from g2rpo_ray.models.policy import load_policy
from tests.models.families.folders import family_config
from tests.models.test_fused import differences
from tests.tiny import encode

# 3 heads do not fill the kernel's tile of 4.
attention = [differences(d, heads, 16, 7, 5, "cpu") for heads in (3, 4) for d in (False, True)]

OPERATORS = ("product_with_gelu", "product_of_parts")

def error(name, *targets, adapters=True):
    lora = {"rank": 2, "alpha": 3.0, "target_modules": targets or None} if adapters else None
    config = family_config(name, f"model.lora={json.dumps(lora)}")
    (prompt,) = encode(config, ["a red circle"])
    policy = load_policy(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            # Adapters do something, and norms have weights.
            weight.add_(0.1 * torch.randn_like(weight))
        x = torch.randn(3, *policy.shape.packed)
        sigma = torch.tensor([1.0, 0.5, 0.1])
        expected = policy(x, sigma, prompt.embeds)
        policy.family.fuse(policy.transformer)
        sum_in_products(policy.transformer)
        as_before = torch.equal(policy(x, sigma, prompt.embeds), expected)
        for _, block in policy.blocks():
            block.compile(backend="aot_eager", fullgraph=True)
        with torch.profiler.profile() as profile:
            ours = policy(x, sigma, prompt.embeds)
    called = {event.key for event in profile.key_averages()}
    inside = [f"g2rpo_ray::{operator}" in called for operator in OPERATORS]
    return as_before, float((ours - expected).abs().max() / expected.abs().max()), inside

names = ("flux1_dev", "sd3", "qwen_image")
whole = [error(name) for name in names]
few = error("qwen_image", "attn.to_q", "attn.to_k", "attn.add_k_proj")
plain = [error(name, adapters=False) for name in names]
print(json.dumps({"attention": attention, "networks": [*whole, few, *plain]}))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    """Of one process: to import what it needs takes longer than what it does."""
    return interpreted(INTERPRETED)


@pytest.mark.slow
def test_attention_is_that_of_diffusers(found: Any) -> None:
    assert [len(results) for results in found["attention"]] == [1, 2, 1, 2]
    assert max(max(results) for results in found["attention"]) < 1e-6


@pytest.mark.slow
def test_compiled_networks_are_those_of_diffusers(found: Any) -> None:
    print(found["networks"])
    assert len(found["networks"]) == 7
    for as_before, error, _ in found["networks"]:
        # Outside compiled code nothing changes.
        assert as_before
        assert 0 < error < 1e-5


@pytest.mark.slow
def test_gelu_is_inside_the_products_that_have_no_adapter(found: Any) -> None:
    flux, sd3, qwen, few, *plain = (inside for *_, inside in found["networks"])
    # Adapters are in the feed-forward of FLUX.1 and Qwen-Image, but not in SD3's.
    assert flux == qwen == [False, False]
    assert plain == [[True, True], [True, False], [True, False]]
    assert [sd3, few] == plain[1:]


@pytest.mark.gpu
@pytest.mark.parametrize("double", [False, True])
def test_attention_at_true_size(double: bool) -> None:
    found = differences(double, 24, 128, 2025, 512, "cuda")
    print(f"largest differences, relative to the largest number: {found}")
    assert max(found) < 0.02
