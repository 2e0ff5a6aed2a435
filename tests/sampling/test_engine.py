"""The engine: what its settings change in the numbers, and what it says where it cannot work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import Config, LoraSection
from g2rpo_ray.maths.granularity import completion_indices
from g2rpo_ray.models.attention import AttentionBackendError
from g2rpo_ray.models.batches import BatchSize, DeviceMemoryError, largest_batch
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.fp8 import Float8Error, Float8Linear, Float8Twin, to_float8
from g2rpo_ray.models.loading import load_part
from g2rpo_ray.models.lora import add_lora
from g2rpo_ray.models.policy import Load, Policy, load_policy
from g2rpo_ray.rollout.worker import RolloutWorker
from g2rpo_ray.sampling.engine import RolloutEngine
from g2rpo_ray.sampling.evaluator import Evaluator
from tests.rollout.tiny import tiny_policy, tiny_prompt
from tests.tiny import Redness, encode, tiny_config

CPU = torch.device("cpu")
CARD = torch.device("cuda")
ENGINE = "g2rpo_ray.sampling.engine"
REDNESS = Redness(["clip", "hps"])


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of "
        "which 1.2 GiB is free. If reserved but unallocated memory is large try ..."
    )


class SmallMemory(Policy):
    """A policy that runs out of memory above a number of latents."""

    most = 2

    def forward(self, latents: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        if len(latents) > self.most:
            raise out_of_memory()
        return super().forward(latents, sigma, embeds)


def small_memory(most: int) -> SmallMemory:
    policy = tiny_policy()
    policy.__class__ = SmallMemory
    assert isinstance(policy, SmallMemory)
    policy.most = most
    return policy


def latents(rows: int) -> tuple[Tensor, Tensor, Conditioning]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4, 16, generator=generator)
    return x, torch.linspace(0.9, 0.2, rows), tiny_prompt().embeds


def test_a_batch_that_does_not_fit_is_halved_once_with_a_warning() -> None:
    policy, warnings = small_memory(most=2), list[str]()
    evaluate = Evaluator(policy, BatchSize(4, "rollout.batch_size", warnings.append))
    expected = Evaluator(tiny_policy(), 2)(*latents(7))
    assert torch.equal(evaluate(*latents(7)), expected)
    assert evaluate.batch_size == 2
    (warning,) = warnings
    assert "rollout.batch_size=4 ran out of device memory" in warning
    assert "Tried to allocate 2.00 GiB" in warning
    assert "going on with 2" in warning


@pytest.mark.parametrize(("most", "batch"), [(1, 4), (0, 1)])
def test_memory_that_ends_again_is_an_error_that_names_the_setting(most: int, batch: int) -> None:
    evaluate = Evaluator(small_memory(most), batch)
    with pytest.raises(DeviceMemoryError, match=r"rollout.batch_size=.* lower rollout.batch_size"):
        evaluate(*latents(batch))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's path for compiled code, without the time that compiling takes."""
    monkeypatch.setattr(f"{ENGINE}.compile_blocks", lambda *_, **__: None)
    monkeypatch.setattr(f"{ENGINE}.compile_decoder", lambda *_: None)


def limit_memory(monkeypatch: pytest.MonkeyPatch, exact: int, twin: int) -> list[tuple[bool, int]]:
    """Most latents in a pass of an engine's policies; returns passes as (of the twin, latents)."""
    passes, forward = [], Policy.forward

    def limited(self: Policy, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        is_twin = any(isinstance(module, Float8Linear) for module in self.modules())
        passes.append((is_twin, len(x)))
        if len(x) > (twin if is_twin else exact):
            raise out_of_memory()
        return forward(self, x, sigma, embeds)

    monkeypatch.setattr(Policy, "forward", limited)
    return passes


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("exact", "twin"), [(4, 8), (8, 4)])
def test_memory_that_ends_at_the_start_halves_the_batch_and_both_policies_meet_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: int, twin: int
) -> None:
    passes = limit_memory(monkeypatch, exact, twin)
    overrides = ["rollout.batch_size=8", "rollout.compile=true", "rollout.fp8=true"]
    engine = RolloutEngine(tiny_config(tmp_path, *overrides), CPU)
    assert engine.batch_size == 4
    assert {(False, 1), (False, 4), (True, 4)} <= set(passes)
    (warning,) = engine.warnings
    assert "rollout.batch_size=8 ran out of device memory" in warning
    assert engine.description.startswith("batches of 4")


@pytest.mark.usefixtures("uncompiled")
def test_memory_that_ends_again_at_the_start_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, exact=2, twin=2)
    config = tiny_config(tmp_path, "rollout.batch_size=8", "rollout.compile=true")
    with pytest.raises(DeviceMemoryError, match=r"lower rollout.batch_size"):
        RolloutEngine(config, CPU)


def test_networks_that_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise out_of_memory()

    monkeypatch.setattr(f"{ENGINE}.Float8Twin", fail)
    with pytest.raises(DeviceMemoryError, match=r"networks: no room .*allocate 2\.00"):
        RolloutEngine(tiny_config(tmp_path, "rollout.fp8=true"), CPU)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("compiled", [False, True])
def test_auto_tries_the_twin_too_by_the_code_that_the_run_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    def on_cpu(config: Config, _: torch.device, load: Load) -> Policy:  # noqa: ARG001
        return load_policy(config)

    monkeypatch.setattr(f"{ENGINE}.load_policy", on_cpu)
    monkeypatch.setattr(f"{ENGINE}.choose_attention", lambda *_: None)
    monkeypatch.setattr(f"{ENGINE}.PictureDecoder.decode", lambda *_: None)
    zeros = torch.zeros

    def zeros_on_cpu(*shape: int, device: object = None, **more: Any) -> Tensor:  # noqa: ARG001
        return zeros(*shape, **more)

    # There is no such device here.
    monkeypatch.setattr(torch, "zeros", zeros_on_cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    passes = limit_memory(monkeypatch, exact=8, twin=4)
    met: list[int] = []
    monkeypatch.setattr(f"{ENGINE}.compile_blocks", lambda *_, **__: met.append(len(passes)))

    def load(*arguments: Any) -> Any:
        return load_part(*arguments[:3])

    monkeypatch.setattr(f"{ENGINE}.load_part", load)
    overrides = ["rollout.batch_size=auto", f"rollout.compile={str(compiled).lower()}"]
    overrides += ["model.dtype=bfloat16", "rollout.fp8=true"]
    engine = RolloutEngine(tiny_config(tmp_path, *overrides), CARD, load)
    assert engine.batch_size == 4
    tried = [(False, 16), (False, 8), (True, 8), (False, 4), (True, 4)]
    assert passes[:5] == tried
    # Both policies were compiled before the first one was tried.
    assert met == [0, 0] * compiled
    assert passes[5:] == [(False, 1), (False, 4), (True, 4)] * compiled


def test_a_card_without_float8_products_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    config = tiny_config(tmp_path, "rollout.fp8=true", "model.dtype=bfloat16")
    asked = r"rollout.fp8 is true: .* capability 8\.0, .* need 8\.9"
    with pytest.raises(Float8Error, match=asked):
        RolloutEngine(config, CARD)


def test_the_largest_batch_that_fits_is_found() -> None:
    tried = []

    def run(rows: int) -> None:
        tried.append(rows)
        if rows > 4:
            raise out_of_memory()

    assert largest_batch((16, 8, 4, 2), run, "x") == 4
    assert tried == [16, 8, 4]
    with pytest.raises(DeviceMemoryError, match="x=auto: not even a batch of 8"):
        largest_batch((16, 8), run, "x")


def test_fixed_shapes_change_no_number_and_show_two_shapes() -> None:
    policy = tiny_policy()
    shapes = set()
    policy.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.add(len(kwargs["hidden_states"])), with_kwargs=True
    )
    evaluate = Evaluator(policy, 4, fixed_shapes=True)
    plain = Evaluator(tiny_policy(), 4)
    for rows in (1, 3, 4, 6):
        torch.testing.assert_close(evaluate(*latents(rows)), plain(*latents(rows)))
    assert shapes == {1, 4}
    assert evaluate.evaluations == plain.evaluations == 14


@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize(("stride", "share", "near"), [(2, 0.62, 0.01), (3, 0.5, 0.02)])
def test_completions_by_a_shared_walk_are_counted_and_stay_near_the_exact_ones(
    tmp_path: Path, batch: int, stride: int, share: float, near: float
) -> None:
    overrides = ["sampling.steps=12", "rollout.decode_batch_size=3", f"rollout.batch_size={batch}"]
    exact = tiny_config(tmp_path, *overrides)
    shared = tiny_config(tmp_path, *overrides, f"rollout.completion_stride={stride}")
    prompt = encode(exact)[0]
    summary, group = RolloutWorker(shared, REDNESS).rollout(prompt, 0, 0)
    exact_summary, exact_group = RolloutWorker(exact, REDNESS).rollout(prompt, 0, 0)
    assert summary.evaluations == make_algorithm(shared).counts(0).evaluations
    assert summary.evaluations < share * exact_summary.evaluations
    # What is trained on is the same to the bit.
    assert torch.equal(group.latents, exact_group.latents)
    assert torch.equal(group.velocities, exact_group.velocities)
    assert not torch.equal(group.rewards, exact_group.rewards)
    torch.testing.assert_close(group.rewards, exact_group.rewards, rtol=0, atol=near)


@pytest.mark.parametrize("stride", [2, 3, 5])
def test_a_shared_walk_is_the_one_written_out_here(tmp_path: Path, stride: int) -> None:
    steps, recipe = 9, [1, 2, 3, 4]
    config = tiny_config(tmp_path, f"sampling.steps={steps}")
    sampler = RolloutEngine(config, CPU).sampler(steps)
    embeds, s = encode(config)[0].embeds, sampler.sigmas.double().numpy()
    step_indices = [0, 3, 7]
    branches = torch.randn(3, 2, *sampler.shape.packed, generator=torch.Generator().manual_seed(5))
    found = dict(sampler.completions(branches, step_indices, recipe, embeds, stride))
    for position, k in enumerate(step_indices):
        nodes = sorted({*range(k + 1, steps, stride), steps - 1})
        x, v = branches[position].double(), {}
        for i in range(k + 1, steps):
            if i in nodes:
                level = torch.full((2,), s[i], dtype=torch.float32)
                here = v[i] = sampler.exact(x.float(), level, embeds).double()
            elif len(v) == 1:
                here = v[k + 1]
            else:
                # A straight line through the last two.
                a, b = [*v][-2:]
                here = v[b] + (s[i] - s[b]) * (v[a] - v[b]) / (s[a] - s[b])
            last, x = x, x + (s[i + 1] - s[i]) * here
        wanted = [last - s[steps - 1] * v[steps - 1]]
        for granularity in recipe[1:]:
            visited = completion_indices(steps, k, granularity)[:-1]
            x = branches[position].double()
            for i, level in zip(visited, [*s[visited[1:]], 0.0], strict=True):
                shares = [
                    np.interp(-s[i], [-s[n] for n in nodes], [float(n == m) for n in nodes])
                    for m in nodes
                ]
                x = x + (level - s[i]) * sum(c * v[m] for c, m in zip(shares, nodes, strict=True))
            wanted.append(x)
        torch.testing.assert_close(
            found[position].double(), torch.stack(wanted), rtol=1e-4, atol=1e-4
        )


def test_float8_rounds_each_row_by_its_own_scale() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [100.0, 50.0, -25.0], [0.0, 0.0, 0.0]])
    rounded, scale = to_float8(x)
    assert rounded.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(rounded.float() * scale, x, rtol=2**-4, atol=0)
    assert scale[0, 0] == 2.0 / 448


@pytest.mark.parametrize("lora", [False, True])
def test_the_float8_twin_follows_the_exact_weights_and_leaves_them_alone(lora: bool) -> None:
    policy = tiny_policy(lora=lora)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    twin = Float8Twin(policy)
    layers = [m for m in twin.policy.modules() if isinstance(m, Float8Linear)]
    # The double block: 8 projections of attention, 4 of both feed-forwards; the single one: 3 + 2.
    assert len(layers) == 17
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())

    def error() -> float:
        with torch.no_grad():
            exact, rough = policy(*latents(3)), twin.policy(*latents(3))
        return float((rough - exact).norm() / exact.norm())

    assert 0 < error() < 0.1
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    stale = error()
    twin.refresh()
    assert 3 * error() < stale


def test_an_adapted_modulation_keeps_its_numbers() -> None:
    policy = tiny_policy()
    lora = LoraSection(target_modules=["norm1.linear", "to_q"])
    add_lora(policy.transformer, lora, policy.family, seed=0)
    twin = Float8Twin(policy).policy
    rounded = {n for n, m in twin.named_modules() if isinstance(m, Float8Linear)}
    assert len(rounded) == 17
    assert not any(".norm" in name for name in rounded)


def test_completions_alone_use_float8(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "rollout.fp8=true")
    prompt = encode(config)[0]
    summary, group = RolloutWorker(config, REDNESS).rollout(prompt, 0, 0)
    _, exact = RolloutWorker(tiny_config(tmp_path), REDNESS).rollout(prompt, 0, 0)
    assert summary.evaluations == make_algorithm(config).counts(0).evaluations
    assert torch.equal(group.velocities, exact.velocities)
    assert not torch.equal(group.rewards, exact.rewards)
    torch.testing.assert_close(group.rewards, exact.rewards, rtol=0, atol=0.05)


@pytest.mark.parametrize("level", ["0.5", "1.0", "-0.1", ".nan"])
def test_a_noise_level_that_nothing_would_use_is_refused(tmp_path: Path, level: str) -> None:
    with pytest.raises(ConfigError, match="fp8_above_sigma"):
        tiny_config(tmp_path, f"rollout.fp8_above_sigma={level}")


def test_float8_ends_at_a_noise_level(tmp_path: Path) -> None:
    def rewards(*overrides: str) -> tuple[Tensor, int]:
        config = tiny_config(tmp_path, *overrides)
        summary, group = RolloutWorker(config, REDNESS).rollout(encode(config)[0], 0, 0)
        return group.rewards, summary.evaluations

    exact, evaluations = rewards()
    everywhere, _ = rewards("rollout.fp8=true")
    early, early_evaluations = rewards("rollout.fp8=true", "rollout.fp8_above_sigma=0.6")
    never, _ = rewards("rollout.fp8=true", "rollout.fp8_above_sigma=0.999")
    assert torch.equal(never, exact)
    assert not torch.equal(early, exact)
    assert (early - exact).abs().mean() < (everywhere - exact).abs().mean()
    assert early_evaluations == evaluations


def test_new_weights_reach_the_float8_twin(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "rollout.fp8=true")
    prompt = encode(config)[0]
    worker = RolloutWorker(config, REDNESS)
    _, before = worker.rollout(prompt, 0, 0)
    weights = {n: p.detach() * 1.02 for n, p in worker.policy.transformer.named_parameters()}
    worker.receive_weights(1, weights)
    _, after = worker.rollout(prompt, 0, 0)
    fresh = RolloutWorker(config, REDNESS)
    fresh.receive_weights(1, weights)
    assert not torch.equal(before.rewards, after.rewards)
    assert torch.equal(fresh.rollout(prompt, 0, 0)[1].rewards, after.rewards)


# In CI Inductor compiles blocks and a decoder by themselves (test_frozen_float8, test_sharing and
# test_qwen_image of the models); here it takes two minutes of a core.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "inductor"),
    [
        pytest.param(False, True, marks=pytest.mark.long),
        pytest.param(True, True, marks=pytest.mark.long),
        (True, False),
    ],
)
def test_compiled_code_gives_the_same_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool, inductor: bool
) -> None:
    traced: list[torch.fx.GraphModule] = []

    def run_as_traced(graph: torch.fx.GraphModule, *_: object, **__: object) -> object:
        traced.append(graph)
        return graph.forward

    if not inductor:
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", run_as_traced)
    overrides = ["rollout.batch_size=4", f"rollout.compile_cache={tmp_path / 'code'}"]
    overrides += ["model.lora.rank=2"] if lora else []
    engine = RolloutEngine(tiny_config(tmp_path, *overrides, "rollout.compile=true"), CPU)
    plain = RolloutEngine(tiny_config(tmp_path, *overrides), CPU)
    assert engine.warnings == []
    assert " compiled" in engine.description
    assert any((tmp_path / "code").iterdir()) if inductor else len(traced) > 2
    embeds = encode(engine.config)[0].embeds
    x = torch.randn(6, *engine.policy.shape.packed, generator=torch.Generator().manual_seed(0))
    ours = engine.sampler(3).trajectory(x, embeds).x0
    expected = plain.sampler(3).trajectory(x, embeds).x0
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    difference = engine.decoder.decode(ours).int() - plain.decoder.decode(expected).int()
    assert int(difference.abs().max()) <= 1


def test_where_compiling_fails_the_rollout_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Callable[..., Tensor]:
        raise RuntimeError("no compiler for this card")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    config = tiny_config(tmp_path, "rollout.compile=true")
    engine = RolloutEngine(config, CPU)
    (warning,) = engine.warnings
    assert "torch.compile failed and the rollout goes on without it" in warning
    assert "no compiler for this card" in warning
    assert "not compiled" in engine.description
    assert not engine.exact.fixed_shapes
    assert not engine.decoder.fixed_shapes
    summary, _ = RolloutWorker(config, REDNESS).rollout(encode(config)[0], 0, 0)
    assert summary.warnings == [warning]


def test_an_unknown_attention_backend_is_named(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "rollout.attention=fastest")
    with pytest.raises(AttentionBackendError, match=r"rollout.attention='fastest'.*cudnn"):
        RolloutEngine(config, CPU)
    config = tiny_config(tmp_path, "rollout.attention=sage")
    with pytest.raises(AttentionBackendError, match=r"rollout.attention='sage'"):
        RolloutEngine(config, CPU)


def test_large_pictures_are_decoded_in_tiles(tmp_path: Path) -> None:
    plain = RolloutEngine(tiny_config(tmp_path), CPU)
    assert not plain.decoder.vae.use_tiling
    tiled = RolloutEngine(tiny_config(tmp_path, "rollout.decode_tile_above_px=64"), CPU)
    assert not tiled.decoder.vae.use_tiling
    large = ["sampling.height=80", "rollout.decode_tile_above_px=64"]
    assert RolloutEngine(tiny_config(tmp_path, *large), CPU).decoder.vae.use_tiling
