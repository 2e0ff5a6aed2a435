"""Every family on a tiny folder of its own: as diffusers draws, and with a ratio of exactly 1."""

from pathlib import Path

import pytest
import torch

from g2rpo_ray.models.adapters import load_adapter
from g2rpo_ray.models.families import FAMILIES, open_family
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.fp8 import Float8Twin
from g2rpo_ray.models.kernels import compile_blocks
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.saving import adapter_tensors, save_adapter
from g2rpo_ray.models.weights import trainable_parameters
from tests.models.families.folders import GUIDED, TINY, family_config, tiny_folder
from tests.rollout.test_update import update
from tests.rollout.tiny import ALGORITHMS, PlainEngine
from tests.scripts.loading import load_script
from tests.tiny import draw_groups, encode

MOST_BYTES = 2**20


def test_every_family_has_a_tiny_folder() -> None:
    made = {open_family(tiny_folder(name)).pipeline for name in TINY}
    assert made == {family.pipeline for family in FAMILIES}


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_folder_is_small_and_the_same_every_time(name: str, tmp_path: Path) -> None:
    folder = tiny_folder(name)
    assert sum(file.stat().st_size for file in folder.rglob("*.*")) <= MOST_BYTES
    torch.manual_seed(0)
    TINY[name].build(tmp_path / "again")
    for file in folder.rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.relative_to(folder)).read_bytes()


@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
@pytest.mark.parametrize(("name", "guidance", "negative"), GUIDED)
def test_a_picture_is_drawn_as_by_diffusers(
    name: str, guidance: float, negative: str, size: tuple[int, int]
) -> None:
    script, (height, width) = load_script("check_family"), map(str, size)
    options = ["--guidance", str(guidance), "--negative-prompt", negative, "--steps", "3"]
    folder = str(tiny_folder(name))
    assert script.main([folder, *options, "--height", height, "--width", width]) == 0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shift", [1.18, 1.57])  # diffusers' own begin below 1, and above
def test_a_folders_schedule_begins_at_one_whatever_its_shift(shift: float, dynamic: bool) -> None:
    scheduler = {"shift": shift, "use_dynamic_shifting": dynamic, "base_shift": 2 - shift}
    for name in TINY:
        family = open_family(tiny_folder(name))
        family.configs["scheduler"] = scheduler
        for steps in (1, 2, 10):
            sigmas = family.schedule(steps, family.latents(64, 64))
            assert (sigmas[0], sigmas[-1]) == (1, 0)
            assert bool((sigmas.diff() < 0).all())


# In CI every two of the three meet: one family has all, the others every algorithm at one size of
# batches and every size with one algorithm.
RATIOS = [
    pytest.param(
        *guided,
        algorithm,
        batch_size,
        marks=()
        if guided is GUIDED[0] or algorithm == ALGORITHMS[0] or batch_size == 3
        else pytest.mark.long,
    )
    for guided in GUIDED
    for algorithm in ALGORITHMS
    for batch_size in (1, 3, 64)
]


@pytest.mark.parametrize(("name", "guidance", "negative", "algorithm", "batch_size"), RATIOS)
def test_the_ratio_before_the_first_update_is_exactly_one(
    name: str, guidance: float, negative: str, algorithm: str, batch_size: int
) -> None:
    config = family_config(
        name,
        f"sampling.guidance={guidance}",
        f"algorithm={algorithm}",
        f"rollout.batch_size={batch_size}",
        "mix_grpo.window=2",
        "e_grpo.first=3",
        "learner.update=per_iteration",
        negative_prompt=negative,
    )
    groups = draw_groups(config, encode(config)[:1])
    report = update(PlainEngine(load_policy(config)), groups, config)
    assert report.records
    assert max(record.health.max_abs_log_ratio for record in report.records) == 0.0
    assert report.grad_norms[0] > 0


@pytest.mark.parametrize(("name", "guidance", "negative"), GUIDED)
def test_diffusion_nft_begins_at_the_old_policy(name: str, guidance: float, negative: str) -> None:
    config = family_config(
        name,
        f"sampling.guidance={guidance}",
        "algorithm=diffusion_nft",
        "diffusion_nft.times_per_picture=2",
        "learner.update=per_iteration",
        negative_prompt=negative,
    )
    (group,) = draw_groups(config, encode(config)[:1])
    policy = load_policy(config)
    assert group.times is not None
    for position, times in enumerate(group.times):
        noised, _ = group.noised(position)
        with torch.no_grad():
            velocity = policy(noised, times, group.prompt.embeds)
        assert torch.equal(velocity, group.velocities[position])
    report = update(PlainEngine(policy), [group], config)
    assert report.taught
    assert report.grad_norms[0] > 0


@pytest.mark.parametrize("name", TINY)
def test_a_worker_draws_the_same_bits_whatever_it_drew_before(name: str) -> None:
    config = family_config(name)
    prompts = encode(config)[:2]
    together, (second,) = draw_groups(config, prompts), draw_groups(config, prompts[1:])
    assert torch.equal(together[1].velocities, second.velocities)
    assert torch.equal(together[1].rewards, second.rewards)


@pytest.mark.parametrize("name", TINY)
def test_adapters_lie_in_the_blocks_alone(name: str) -> None:
    policy = load_policy(family_config(name, "model.lora.rank=2"))
    trained = [n for n, p in policy.transformer.named_parameters() if p.requires_grad]
    blocks = tuple(name.removeprefix("transformer.") + "." for name, _ in policy.blocks())
    assert trained
    assert all(name.startswith(blocks) for name in trained)
    # Every block has some.
    assert {b for b in blocks if any(n.startswith(b) for n in trained)} == set(blocks)


@pytest.mark.long
@pytest.mark.parametrize("name", TINY)
def test_a_compiled_network_draws_what_the_plain_one_does(name: str) -> None:
    config = family_config(name)
    (prompt,) = encode(config)[:1]
    plain, compiled = load_policy(config), load_policy(config)
    compile_blocks(compiled, cache=None)
    x = torch.randn(2, *plain.shape.packed, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.4])
    with torch.no_grad():
        expected, found = plain(x, sigma, prompt.embeds), compiled(x, sigma, prompt.embeds)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_an_adapter_of_another_family_is_refused(name: str, tmp_path: Path) -> None:
    config = family_config(name, "model.lora.rank=2")
    family, lora = open_family(tiny_folder(name)), config.model.lora
    assert lora is not None
    save_adapter(adapter_tensors(trainable_parameters(load_policy(config)), lora), family, tmp_path)
    for other in TINY:
        foreign = load_policy(family_config(other))
        if foreign.family.pipeline == family.pipeline:
            load_adapter(foreign.transformer, tmp_path, foreign.family)
        else:
            with pytest.raises(ModelFolderError, match=r"another model|does not fit"):
                load_adapter(foreign.transformer, tmp_path, foreign.family)


@pytest.mark.parametrize("name", TINY)
def test_float8_products_come_near_the_exact_velocity(name: str) -> None:
    config = family_config(name)
    (prompt,) = encode(config)[:1]
    policy = load_policy(config)
    twin = Float8Twin(policy).policy
    x = torch.randn(2, *policy.shape.packed, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.4])
    with torch.no_grad():
        exact, rounded = policy(x, sigma, prompt.embeds), twin(x, sigma, prompt.embeds)
    error = float((rounded - exact).norm() / exact.norm())
    assert 0 < error < 0.2
