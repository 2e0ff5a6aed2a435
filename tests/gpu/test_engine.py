"""The rollout engine at true size on a card: FLUX.1-dev's architecture with random weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.maths.schedule import static_shift_schedule
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.kernels import compile_blocks
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.weights import trainable_parameters
from g2rpo_ray.sampling.engine import RolloutEngine
from g2rpo_ray.sampling.group import GroupKey
from tests.tiny import tiny_config

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
FEW_BLOCKS = {"num_layers": 2, "num_single_layers": 2}


def true_size(tmp_path: Path, *overrides: str, **architecture: int) -> Config:
    """The paper's sampling on FLUX.1-dev's architecture, or one with fewer blocks."""
    folder = Path(shutil.copytree(resolve_path("tiny_world:flux"), tmp_path / "flux"))
    transformer = {**Flux1.published["FLUX.1-dev"].configs["transformer"], **architecture}
    (folder / "transformer" / "config.json").write_text(json.dumps(transformer))
    (folder / "vae" / "config.json").write_text(
        json.dumps(Flux1.published["FLUX.1-dev"].configs["vae"])
    )
    return tiny_config(
        tmp_path / "run",
        f"model.path={folder}",
        "model.random_weights=true",
        "model.dtype=bfloat16",
        "prompts.max_sequence_length=512",
        "sampling.height=720",
        "sampling.width=720",
        "sampling.steps=16",
        "sampling.members=12",
        "rollout.batch_size=8",
        "rollout.decode_batch_size=4",
        "rollout.gpus_per_worker=1",
        *overrides,
    )


def random_embeds() -> Conditioning:
    generator = torch.Generator().manual_seed(0)
    t5 = torch.randn(512, 4096, generator=generator)
    pooled = torch.randn(768, generator=generator)
    return Conditioning({"t5": t5.bfloat16(), "pooled": pooled.bfloat16()}).to(CARD)


def log_probs(config: Config, v: Tensor, other_v: Tensor, k: int) -> Tensor:
    """|log p - other log p| of 12 branches of the anchor's step k."""
    shape = (2025, 64)
    sigmas = static_shift_schedule(config.sampling.steps, config.sampling.shift, torch.float32)
    step = SdeStep.at(sigmas, k, config.sampling.sde, config.sampling.eta)
    key = GroupKey(0, 0)
    x = key.initial_noise(shape)[None].to(CARD)
    taken = step.sample(step.mean(x, v), key.branch_noise(shape, k, 12).to(CARD))
    return (
        step.log_prob(taken, step.mean(x, v)) - step.log_prob(taken, step.mean(x, other_v))
    ).abs()


def test_compiled_and_eager_ratios_stay_inside_the_clip_range(tmp_path: Path) -> None:
    config = true_size(tmp_path)
    embeds, sigma = random_embeds(), torch.tensor([0.9], device=CARD)
    x = GroupKey(0, 0).initial_noise((2025, 64))[None].to(CARD)
    learner = load_policy(config, CARD)
    with torch.no_grad():
        expected = learner(x, sigma, embeds)
    del learner
    torch.cuda.empty_cache()
    engine = RolloutEngine(config, CARD)
    assert engine.warnings == []
    v = engine.exact(x, sigma, embeds)
    differences = [float(log_probs(config, v, expected, k).max()) for k in (0, 3, 7)]
    print(f"relative |v - v'| {float((v - expected).norm() / expected.norm()):.2e}, ", end="")
    print(f"max |delta log p| at k = 0, 3, 7: {differences}")
    assert float((v - expected).norm() / expected.norm()) < 0.03
    assert max(differences) < 1e-4
    assert engine.decoder.decode(x).shape == (1, 720, 720, 3)


def test_flash3_is_as_near_to_the_eager_learner_as_cudnn(tmp_path: Path) -> None:
    pytest.importorskip("fa3_fwd_interface")
    configs = {
        attention: true_size(tmp_path / attention, f"rollout.attention={attention}", **FEW_BLOCKS)
        for attention in ("cudnn", "flash3")
    }
    x, embeds = torch.randn(8, 2025, 64, device=CARD), random_embeds()
    sigma = torch.linspace(0.9, 0.2, 8, device=CARD)
    with torch.no_grad():
        expected = load_policy(true_size(tmp_path / "eager", **FEW_BLOCKS), CARD)(x, sigma, embeds)
    errors = {}
    for attention, config in configs.items():
        engine = RolloutEngine(config, CARD)
        assert engine.warnings == []
        assert f"attention {attention}, compiled" in engine.description
        v = engine.exact(x, sigma, embeds)
        errors[attention] = float((v - expected).norm() / expected.norm())
        torch._dynamo.reset()
    print(f"relative |v - v'| from the eager learner's: {errors}")
    assert 0 < errors["flash3"] < 1.2 * errors["cudnn"]


def test_the_float8_twin_is_near_the_exact_policy(tmp_path: Path) -> None:
    engine = RolloutEngine(true_size(tmp_path, "rollout.fp8=true", **FEW_BLOCKS), CARD)
    assert engine.warnings == []
    x = torch.randn(8, 2025, 64, device=CARD)
    sigma, embeds = torch.linspace(0.9, 0.2, 8, device=CARD), random_embeds()
    exact, rough = engine.exact(x, sigma, embeds), engine.estimate(x, sigma, embeds)
    error = float((rough - exact).norm() / exact.norm())
    print(f"relative |v - v'| with float8 {error:.2e}")
    assert 0 < error < 0.1


def test_a_compiled_learner_has_gradients(tmp_path: Path) -> None:
    policy = load_policy(true_size(tmp_path, "model.lora.rank=4", **FEW_BLOCKS), CARD)
    compile_blocks(policy, cache=None)
    x = GroupKey(0, 0).initial_noise((2025, 64))[None].to(CARD)
    policy(x, torch.tensor([0.9], device=CARD), random_embeds()).square().mean().backward()
    gradients = [p.grad for p in trainable_parameters(policy).values()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_a_batch_too_large_for_the_card_is_halved(tmp_path: Path) -> None:
    config = true_size(tmp_path, "rollout.batch_size=64", "rollout.compile=false", **FEW_BLOCKS)
    engine = RolloutEngine(config, CARD)
    held = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(CARD).total_memory
    # Room for the 7 GiB of 32 latents, not for the 13 of 64.
    torch.cuda.set_per_process_memory_fraction((held + 11 * 2**30) / total)
    try:
        x, sigma = torch.randn(64, 2025, 64, device=CARD), torch.full((64,), 0.5, device=CARD)
        assert engine.exact(x, sigma, random_embeds()).isfinite().all()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.batch_size == 32
    assert "rollout.batch_size=64 ran out of device memory" in engine.warnings[0]


def test_auto_finds_a_batch(tmp_path: Path) -> None:
    config = true_size(tmp_path, "rollout.batch_size=auto", "rollout.compile=false", **FEW_BLOCKS)
    assert RolloutEngine(config, CARD).batch_size == 16
