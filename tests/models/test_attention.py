"""rollout.attention: where it goes, by a stand-in for FlashAttention-3, and what is refused."""

import importlib.machinery
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from g2rpo_ray.models.attention import (
    AttentionBackendError,
    _attention,
    check_attention,
    choose_attention,
    flash3,
    route_to_flash3,
)
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.training.session import open_session
from tests.flash3 import TAKEN, flash3_package  # noqa: F401
from tests.models.families.folders import family_config
from tests.models.interpreted import interpreted
from tests.tiny import encode, tiny_config

ROOT = Path(__file__).parents[2]


def heads(batch: int, tokens: int, count: int, size: int) -> list[Tensor]:
    """Queries, keys and values; values lie as a slice of a joint product's answer does."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, batch, tokens, count, size, generator=generator).bfloat16()
    beside = torch.cat([v.flatten(2), v.flatten(2)], dim=2)[:, :, : count * size]
    return [q, k, beside.unflatten(2, (count, size))]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """In float32, heads behind tokens."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@pytest.mark.usefixtures("flash3_package")
def test_the_operator_is_attention_and_says_its_shape_before() -> None:
    q, k, v = heads(2, 33, 3, 16)
    torch.testing.assert_close(flash3(q, k, v).float(), sdpa(q, k, v), rtol=2e-2, atol=1e-2)
    torch.library.opcheck(flash3, (q, k, v))


@pytest.mark.usefixtures("flash3_package")
@pytest.mark.parametrize(
    ("tokens", "size", "masked", "taken"),
    [
        (40, 64, False, True),
        (128, 64, False, False),
        (128, 128, False, True),
        (40, 128, True, False),
    ],
)
def test_masks_and_what_cudnn_is_faster_at_go_to_sdpa(
    tokens: int, size: int, masked: bool, taken: bool
) -> None:
    q, k, v = heads(2, tokens, 1, size)
    mask = None
    if masked:
        mask = torch.arange(tokens).expand(2, 1, 1, tokens) < tokens // 2
    answer = _attention(q, k, v, attn_mask=mask)
    assert len(TAKEN) == taken
    torch.testing.assert_close(answer.float(), sdpa(q, k, v, mask), rtol=2e-2, atol=1e-2)


def attentions(policy: Policy) -> int:
    return sum(hasattr(module, "processor") for module in policy.transformer.modules())


@pytest.mark.usefixtures("flash3_package")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["flux1_dev", "flux2_klein", "qwen_image", "z_image"])
def test_every_attention_of_a_network_goes_there(name: str, compiled: bool) -> None:
    config = family_config(name, "model.dtype=bfloat16")
    (prompt,) = encode(config, ["a red circle"])
    policy = load_policy(config)
    x, sigma = torch.randn(3, *policy.shape.packed), torch.tensor([1.0, 0.5, 0.1])
    with torch.no_grad():
        expected = policy(x, sigma, prompt.embeds)
        route_to_flash3(policy.transformer)
        if compiled:
            for _, block in policy.blocks():
                block.compile(backend="aot_eager", fullgraph=True)
        ours = policy(x, sigma, prompt.embeds)
    # Qwen-Image calls its network for each of two texts.
    assert len(TAKEN) == attentions(policy) * (2 if name == "qwen_image" else 1)
    error = float((ours - expected).norm() / expected.norm())
    assert 0 < error < 0.03, "bfloat16 rounds both, at other places"


FUSED = """
import json, torch
from g2rpo_ray.models.attention import route_to_flash3
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.training.session import open_session
from tests.flash3 import TAKEN
from tests.models.families.folders import family_config
from tests.tiny import encode

def velocity(name, flash3):
    torch._dynamo.reset()
    config = family_config(name, "model.dtype=bfloat16")
    (prompt,) = encode(config, ["a red circle"])
    policy = load_policy(config)
    if flash3:
        route_to_flash3(policy.transformer)
    policy.family.fuse(policy.transformer)
    for _, block in policy.blocks():
        block.compile(backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    x = torch.randn(3, *policy.shape.packed)
    with torch.no_grad():
        return policy(x, torch.tensor([1.0, 0.5, 0.1]), prompt.embeds)

found = []
for name in ("flux1_dev", "sd3", "qwen_image"):
    expected, before = velocity(name, False), len(TAKEN)
    ours = velocity(name, True)
    error = float((ours - expected).norm() / expected.norm())
    found.append([before, len(TAKEN), error])
    TAKEN.clear()
print(json.dumps(found))
"""


@pytest.mark.long
def test_so_do_those_of_the_rollouts_own_kernels() -> None:
    pytest.importorskip("triton", reason="PyTorch for CPUs alone comes without Triton")
    for name, (before, taken, error) in zip(
        ("flux1_dev", "sd3", "qwen_image"), interpreted(FUSED), strict=True
    ):
        policy = load_policy(family_config(name))
        assert before == 0
        assert taken == attentions(policy) * (2 if name == "qwen_image" else 1)
        assert 0 <= error < 0.03


@pytest.mark.parametrize("size", [12, 264])
def test_heads_of_another_size_are_named(size: int) -> None:
    attention = FluxAttention(query_dim=8, heads=2, dim_head=size, processor=FluxAttnProcessor())
    said = rf"attn of the transformer has heads of {size} .*multiples of 8 up to 256"
    with pytest.raises(AttentionBackendError, match=said):
        route_to_flash3(nn.ModuleDict({"attn": attention}))


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(AttentionBackendError, match=r"Hopper cards.*this worker computes on the C"):
        choose_attention(on_cpu, "flash3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S")
    with pytest.raises(AttentionBackendError, match=r"9\.0.*on NVIDIA L40S; .*label_selector"):
        choose_attention(SimpleNamespace(device=torch.device("cuda")), "flash3")


def test_a_package_that_is_missing_or_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(
        tmp_path, "rollout.attention=flash3", "model.dtype=bfloat16", "rollout.gpus_per_worker=1"
    )
    name = "fa3_fwd_interface"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AttentionBackendError, match=r"fa3-fwd is not installed.*\[flash3\]"):
        check_attention(config)
    with pytest.raises(AttentionBackendError, match="fa3-fwd"), open_session(config, "none"):
        pytest.fail("it is no place to start from")
    check_attention(tiny_config(tmp_path, "rollout.attention=cudnn"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(AttentionBackendError, match=r"fa3_fwd_interface.*CUDA 13.*cudnn"):
        choose_attention(SimpleNamespace(device=torch.device("cuda")), "flash3")
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    check_attention(config)


KEPT = """
import json, torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from g2rpo_ray.models.attention import choose_attention
found = []
for kernel in ("math", "flash", "flash"):
    torch.compiler.reset()
    choose_attention(None, kernel)
    compiled = torch.compile(lambda x: scaled_dot_product_attention(x, x, x), fullgraph=True)
    with torch.no_grad():
        compiled(torch.ones(1, 1, 8, 16))
    found.append(counters["aot_autograd"]["autograd_cache_hit"])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_compiled_code_of_another_kernel_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEPT],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "count", "size"), [(2537, 24, 128), (1229, 24, 64)])
def test_on_a_card_it_is_as_near_to_float32_as_cudnn(tokens: int, count: int, size: int) -> None:
    pytest.importorskip("fa3_fwd_interface")
    q, k, v = (x.cuda() for x in heads(2, tokens, count, size))
    exact = sdpa(q, k, v)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        cudnn = scaled_dot_product_attention(q_, k_, v_)
    ours = flash3(q, k, v)
    errors = [float((x - exact).norm() / exact.norm()) for x in (ours, cudnn.transpose(1, 2))]
    print(f"errors of flash3 and cuDNN, relative to float32: {errors}")
    assert errors[0] < 1.1 * errors[1]
    # The same bits for a sample in whatever batch.
    assert torch.equal(flash3(q[:1], k[:1], v[:1]), ours[:1])
