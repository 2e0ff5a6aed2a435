"""Z-Image: texts of their own lengths, guidance from 0 on, its limit."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.kernels import compile_blocks
from g2rpo_ray.models.loading import check_model
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.plan.networks import policy_size
from tests.models.families.folders import family_config, tiny_folder
from tests.rollout.test_update import update
from tests.rollout.tiny import PlainEngine
from tests.scripts.loading import load_script
from tests.tiny import draw_groups, encode


def of_lengths(policy: Policy, rows: int, lengths: tuple[int, int]) -> torch.Tensor:
    """A velocity on random texts of so many tokens."""
    generator = torch.Generator().manual_seed(sum(lengths))
    positive, negative = (
        Conditioning({"text": torch.randn(length, 16, generator=generator)}) for length in lengths
    )
    x = torch.randn(rows, *policy.shape.packed, generator=generator)
    conditioning = Conditioning(positive.tensors, negative)
    with torch.no_grad():
        return policy(x, torch.linspace(0.9, 0.2, rows), conditioning)


def test_texts_keep_their_lengths() -> None:
    config = family_config("z_image", "prompts.max_sequence_length=40")
    short, long = encode(config, ["a", "a red circle left of a blue square"])
    assert len(short.embeds["text"]) < len(long.embeds["text"])


@pytest.mark.parametrize("algorithm", ["g2rpo", "flow_grpo"])
@pytest.mark.parametrize("name", ["qwen_image", "z_image"])
def test_the_ratio_is_exactly_one_where_texts_differ_in_length(name: str, algorithm: str) -> None:
    config = family_config(
        name,
        "prompts.max_sequence_length=100",
        f"algorithm={algorithm}",
        "rollout.batch_size=3",
        "learner.update=per_iteration",
    )
    prompts = encode(config, ["a red circle " * 20])
    groups = draw_groups(config, prompts)
    report = update(PlainEngine(load_policy(config)), groups, config)
    assert max(record.health.max_abs_log_ratio for record in report.records) == 0.0


@pytest.mark.slow
def test_blocks_compile_for_all_lengths_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler's first half alone: it is what counts and refuses new shapes.
    compile_plainly = partial(torch.nn.Module.compile)
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile_plainly(self, backend="eager", **options),
    )
    torch._dynamo.utils.counters.clear()
    plain, compiled = (load_policy(family_config("z_image")) for _ in range(2))
    lengths_of = ((48, 48), (48, 20), (90, 20), (20, 20), (150, 20), (20, 40), (200, 20), (9, 9))
    counts = []
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_blocks(compiled, cache=None)
        for lengths in lengths_of:
            for rows in (1, 4):
                found = of_lengths(compiled, rows, lengths)
                torch.testing.assert_close(found, of_lengths(plain, rows, lengths))
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # Few in all, and none for a length that comes later.
    assert counts[-1] == counts[2] <= 12


def test_guidance_begins_at_zero() -> None:
    family = open_family(tiny_folder("z_image"))
    assert [family.passes(scale) for scale in (0.0, 0.5, 4.0)] == [1, 2, 2]
    with pytest.raises(ModelFolderError, match="guidance 0 is the conditional pass alone"):
        check_model(family_config("z_image", "sampling.guidance=0"))


def test_the_pipelines_limit_of_a_guided_velocity(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("z_image"), tmp_path / "z_image"))
    (folder / "call.json").write_text(json.dumps({"common": {"cfg_normalization": 1.0}}))
    config = family_config("z_image", f"model.path={folder}")
    (prompt,) = encode(config)[:1]
    limited, free = load_policy(config), load_policy(family_config("z_image"))
    alone = load_policy(config, guided=False)
    x = torch.randn(2, *free.shape.packed, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norms = [p(x, torch.full((2,), 0.5), prompt.embeds).norm() for p in (limited, free, alone)]
    assert norms[0] < norms[1]
    script = load_script("check_family")
    options = ["--guidance", "4", "--negative-prompt", "a blue square", "--steps", "3"]
    assert script.main([str(folder), *options]) == 0


def test_channels_of_another_vae(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("z_image"), tmp_path / "z_image"))
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"latent_channels": 4}))
    with pytest.raises(ModelFolderError, match=r"in_channels 16 .* latent_channels 4"):
        check_model(family_config("z_image", f"model.path={folder}"))


def test_published_size() -> None:
    size = policy_size(family_config("z_image", "model.path=models/Z-Image"))
    assert size.parameters == 6_154_908_736
