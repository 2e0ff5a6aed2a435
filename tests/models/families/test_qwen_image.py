"""Qwen-Image: texts of their own length, guidance of the conditional pass's length."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.kernels import compile_decoder
from g2rpo_ray.models.loading import check_model, load_part
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.plan.networks import policy_size
from tests.models.families.folders import family_config, tiny_folder
from tests.tiny import encode


def test_texts_have_their_own_length_and_older_ones_the_same_velocity() -> None:
    config = family_config("qwen_image", "prompts.max_sequence_length=40")
    (prompt,) = encode(config, ["a red circle"])
    text = prompt.embeds["text"]
    # Of six tokens; with the template's end, of eleven.
    assert text.shape[0] < 40
    padded = pad(text, (0, 0, 0, 40 - len(text)), value=9.0)
    mask = pad(torch.ones_like(text[:, 0]), (0, 40 - len(text)))
    older = replace(prompt.embeds, tensors={"text": padded, "mask": mask})
    policy = load_policy(config)
    x = torch.randn(3, *policy.shape.packed, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, before = (
            policy(x, torch.tensor([1.0, 0.5, 0.1]), embeds) for embeds in (prompt.embeds, older)
        )
    assert torch.equal(own, before)


def test_a_guided_velocity_is_as_long_as_the_conditional_one() -> None:
    config = family_config("qwen_image")
    (prompt,) = encode(config)[:1]
    guided, alone = load_policy(config), load_policy(config, guided=False)
    x = torch.randn(2, *guided.shape.packed, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, positive = (p(x, torch.full((2,), 0.5), prompt.embeds) for p in (guided, alone))
    assert not torch.allclose(found, positive, rtol=1e-3)
    torch.testing.assert_close(found.norm(dim=-1), positive.norm(dim=-1))


@pytest.mark.long
def test_a_decoder_of_videos_compiles() -> None:
    model = ModelSection(path=str(tiny_folder("qwen_image")), dtype="float32")
    vae = load_part(model, "vae", torch.float32)
    config = family_config("qwen_image")
    policy = load_policy(config)
    x = torch.randn(2, *policy.shape.packed, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = policy.family.decode(vae, x, policy.shape)
        compile_decoder(vae.decoder)
        found = policy.family.decode(vae, x, policy.shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_channels_of_another_vae(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("qwen_image"), tmp_path / "qwen"))
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"out_channels": 16}))
    with pytest.raises(ModelFolderError, match=r"predicts out_channels 64.*packed 4 x 4 = 16"):
        check_model(family_config("qwen_image", f"model.path={folder}"))


@pytest.mark.slow
def test_published_size() -> None:
    config = family_config("qwen_image", "model.path=models/Qwen-Image")
    size = policy_size(config)
    assert size.parameters == 20_430_401_088
    assert size.passes == 2
