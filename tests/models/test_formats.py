"""Exported adapters, read by rules that are written here anew from those of the programs.

ComfyUI: comfy/lora.py (model_lora_keys_unet, load_lora) names every weight of its own network
``diffusion_model.<name>`` or ``lora_unet_<name with _>``; comfy/utils.py (flux_to_diffusers,
mmdit_to_diffusers, z_image_to_diffusers) says which rows of which of them a weight of diffusers
has; its Qwen-Image has diffusers' names. kohya-ss/sd-scripts: networks/convert_flux_lora.py has
FLUX.1's names, networks/lora_sd3.py makes those of SD3; both want alpha, and scale by alpha / rank.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor

from g2rpo_ray.maths import noise
from g2rpo_ray.models.adapters import load_adapter
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.formats import Format, named_for, peft_settings
from g2rpo_ray.models.loading import on_meta
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.saving import ADAPTER_FILE, adapter_tensors, save_named
from g2rpo_ray.models.weights import trainable_parameters
from tests.models.families.folders import TINY, family_config, tiny_folder

LORA = "model.lora={rank: 3, alpha: 7.5}"
STREAMS = {"to_([qkv])": "img", "add_([qkv])_proj": "txt"}
MLP = {"net.0.proj": "0", "net.2": "2", "linear_in": "0", "linear_out": "2"}
FLUX = [
    (rf"transformer_blocks.(\d+).attn.{q}", rf"double_blocks.\1.{stream}_attn.qkv|\2")
    for q, stream in STREAMS.items()
]
FLUX += [
    (r"transformer_blocks.(\d+).attn.to_out.0", r"double_blocks.\1.img_attn.proj"),
    (r"transformer_blocks.(\d+).attn.to_add_out", r"double_blocks.\1.txt_attn.proj"),
]
FLUX += [
    (rf"transformer_blocks.(\d+).{ff}.{ours}", rf"double_blocks.\1.{stream}_mlp.{theirs}")
    for ff, stream in (("ff", "img"), ("ff_context", "txt"))
    for ours, theirs in MLP.items()
]
FLUX += [
    (r"single_transformer_blocks.(\d+).attn.to_([qkv])", r"single_blocks.\1.linear1|\2"),
    (r"single_transformer_blocks.(\d+).proj_mlp", r"single_blocks.\1.linear1|mlp"),
    (r"single_transformer_blocks.(\d+).(proj_out|attn.to_out)", r"single_blocks.\1.linear2"),
    (r"single_transformer_blocks.(\d+).attn.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
]
SD3 = [
    (r"transformer_blocks.(\d+).(attn2?).to_([qkv])", r"joint_blocks.\1.x_block.\2.qkv|\3"),
    (r"transformer_blocks.(\d+).(attn2?).to_out.0", r"joint_blocks.\1.x_block.\2.proj"),
    (
        r"transformer_blocks.(\d+).attn.add_([qkv])_proj",
        r"joint_blocks.\1.context_block.attn.qkv|\2",
    ),
    (r"transformer_blocks.(\d+).attn.to_add_out", r"joint_blocks.\1.context_block.attn.proj"),
]
Z_IMAGE = [
    (r"(\w+.\d+).attention.to_([qkv])", r"\1.attention.qkv|\2"),
    (r"(\w+.\d+).attention.to_out.0", r"\1.attention.out"),
    (r"(\w+.\d+.feed_forward.w[123])", r"\1"),
]
RULES = {"flux": FLUX, "sd3": SD3, "z_": Z_IMAGE, "qwen": [("(.+)", r"\1")]}


def place(family: str, layer: str) -> tuple[str, str]:
    """The layer that the program has, and which part of its rows, if not all."""
    rules = next(found for start, found in RULES.items() if family.startswith(start))
    for ours, theirs in rules:
        if match := re.fullmatch(ours, layer):
            name, _, part = match.expand(theirs).partition("|")
            return name, part
    raise AssertionError(f"no rule for {layer}")


def rows(policy: Policy, layer: str, part: str) -> slice:
    """q, k and v have as many rows each, and what is joined behind them begins at the fourth."""
    count = len(policy.transformer.get_submodule(layer).weight)
    if not part:
        return slice(0, count)
    if part == "mlp":
        width = len(policy.transformer.get_submodule(layer.replace("proj_mlp", "attn.to_q")).weight)
        return slice(3 * width, 3 * width + count)
    return slice("qkv".index(part) * count, ("qkv".index(part) + 1) * count)


def trained(name: str, *overrides: str) -> tuple[Policy, dict[str, Tensor], dict[str, Tensor]]:
    """A policy, its adapter by diffusers' names, and what every adapter adds to its layer."""
    config = family_config(name, LORA, *overrides)
    policy = load_policy(config)
    with torch.no_grad():
        for key, weight in trainable_parameters(policy).items():
            weight.copy_(noise.normal(tuple(weight.shape), key))
        assert config.model.lora is not None
        tensors = adapter_tensors(trainable_parameters(policy), config.model.lora)
    return policy, tensors, deltas(policy.transformer)


def deltas(transformer: Any) -> dict[str, Tensor]:
    return {
        name: layer.get_delta_weight("default").detach()
        for name, layer in transformer.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }


def exported(name: str, form: Format, tensors: dict[str, Tensor], folder: Path) -> Path:
    family = open_family(tiny_folder(name))
    file = folder / ADAPTER_FILE
    save_named(named_for(form, tensors, on_meta(family, "transformer"), family), file)
    return file


CASES = [(name, "comfyui") for name in TINY]
CASES += [(name, "kohya") for name in TINY if name.startswith(("flux1", "sd3"))]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_program_finds_the_same_change_of_every_weight(
    name: str, form: Format, tmp_path: Path
) -> None:
    policy, tensors, expected = trained(name)
    content = load_file(exported(name, form, tensors, tmp_path))
    whole: dict[str, Tensor] = {}
    for key in [k.removesuffix(".alpha") for k in content if k.endswith(".alpha")]:
        down, up = content.pop(f"{key}.lora_down.weight"), content.pop(f"{key}.lora_up.weight")
        whole[key] = content.pop(f"{key}.alpha").item() / len(down) * (up @ down)
    assert not content, "keys that the program does not load"
    for layer, delta in expected.items():
        theirs, part = place(name, layer)
        comfy = f"diffusion_model.{theirs}"
        key = comfy if form == "comfyui" else "lora_unet_" + theirs.replace(".", "_")
        found = whole[key][rows(policy, layer, part)]
        torch.testing.assert_close(found, delta, rtol=1e-5, atol=1e-5)
        whole[key][rows(policy, layer, part)] = 0
    assert not any(rest.any() for rest in whole.values()), "changes of what was not trained"


@pytest.mark.parametrize(("name", "form"), [*CASES, *((name, "peft") for name in TINY)])
def test_an_adapter_comes_back_as_it_was(name: str, form: Format, tmp_path: Path) -> None:
    _, tensors, expected = trained(name)
    file = exported(name, form, tensors, tmp_path)
    if form == "peft":
        settings = peft_settings(load_file(file))
        assert (settings["r"], settings["lora_alpha"]) == (3, 3)
        assert settings["target_modules"] == sorted(expected)
        file.with_name("adapter_config.json").write_text(json.dumps(settings))
    plain = load_policy(family_config(name))
    load_adapter(plain.transformer, file, plain.family)
    found = deltas(plain.transformer)
    assert found.keys() == expected.keys()
    for layer, delta in expected.items():
        torch.testing.assert_close(found[layer], delta, rtol=1e-5, atol=1e-5)
        # What was joined came apart: no larger, and the same numbers.
        bound = plain.transformer.get_submodule(layer).lora_A["default"].weight
        assert torch.equal(bound, tensors[layer + ".lora_A.weight"]), layer


def test_a_part_without_adapter_stays_without(tmp_path: Path) -> None:
    _, tensors, expected = trained("sd3", "model.lora.target_modules=[attn.to_q, attn.to_v]")
    file = exported("sd3", "kohya", tensors, tmp_path)
    assert all("x_block_attn_qkv" in key for key in load_file(file))
    plain = load_policy(family_config("sd3"))
    load_adapter(plain.transformer, file, plain.family)
    assert deltas(plain.transformer).keys() == expected.keys()


@pytest.mark.parametrize("name", ["flux2_dev", "qwen_image", "z_image"])
def test_a_family_that_a_format_cannot_hold_is_named(name: str, tmp_path: Path) -> None:
    _, tensors, _ = trained(name)
    pipeline = open_family(tiny_folder(name)).pipeline
    with pytest.raises(ModelFolderError, match=f"sd-scripts has no model of .*{pipeline}"):
        exported(name, "kohya", tensors, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_layer_that_a_format_cannot_hold_is_named(tmp_path: Path) -> None:
    _, tensors, _ = trained("flux1_dev", "model.lora.target_modules=[x_embedder, attn.to_q]")
    with pytest.raises(ModelFolderError, match=r"1 of .* no place there, first x_embedder"):
        exported("flux1_dev", "comfyui", tensors, tmp_path)
    assert not list(tmp_path.iterdir())
