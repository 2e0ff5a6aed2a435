"""Which weight files win: the index and the plain file decide, a setting chooses a variant."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.loading import check_model, load_part
from g2rpo_ray.models.saving import load_transformer_weights
from tests.tiny import copy_flux, reshard, tiny_config

STEM = "diffusion_pytorch_model"
SHARDS = [f"{STEM}-0000{number}-of-00002.safetensors" for number in (1, 2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_flux(tmp_path / "flux")


@pytest.fixture
def true_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "transformer" / f"{STEM}.safetensors")


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor * 0.5 for name, tensor in tensors.items()}


def read_both_ways(folder: Path, variant: str | None = None) -> list[dict[str, Tensor]]:
    """The transformer as model.path and as --checkpoint give it."""
    model = ModelSection(path=str(folder), variant=variant)
    found = []
    for filled in (False, True):
        network = load_part(model, "transformer", torch.float32)
        if filled:
            for weight in network.parameters():
                weight.zero_()
            load_transformer_weights(network, folder / "transformer", variant)
        found.append(dict(network.state_dict()))
    return found


def refusals(folder: Path) -> list[str]:
    """What model.path and --checkpoint say."""
    messages = []
    network = load_part(ModelSection(path="tiny_world:flux"), "transformer", torch.float32)
    with pytest.raises(ModelFolderError) as caught:
        check_model(tiny_config(folder / "run", f"model.path={folder}"))
    messages.append(str(caught.value))
    with pytest.raises(ModelFolderError) as caught:
        load_transformer_weights(network, folder / "transformer")
    return [*messages, str(caught.value)]


@pytest.mark.parametrize("second", ["_fp8", ".zero_ema", ".fp16", " (1)", "-00001-of-00002"])
def test_the_plain_file_wins_over_what_lies_beside_it(
    folder: Path, true_weights: dict[str, Tensor], second: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(halved(true_weights), folder / "transformer" / f"{STEM}{second}.safetensors")
    for found in read_both_ways(folder):
        assert all(torch.equal(found[name], t) for name, t in true_weights.items())
    check_model(tiny_config(folder / "run", f"model.path={folder}"))
    (told,) = caplog.messages
    assert f"read from {STEM}.safetensors, not from {STEM}{second}.safetensors beside it" in told


def test_the_index_wins_over_shards_of_another_save(
    folder: Path, true_weights: dict[str, Tensor]
) -> None:
    reshard(folder / "transformer", STEM)
    save_file(halved(true_weights), folder / "transformer" / f"{STEM}-00001-of-00003.safetensors")
    for found in read_both_ways(folder):
        assert all(torch.equal(found[name], t) for name, t in true_weights.items())


def test_a_tensor_in_a_shard_that_the_index_does_not_name_for_it_is_refused(folder: Path) -> None:
    part = folder / "transformer"
    reshard(part, STEM)
    first, second = (load_file(part / name) for name in SHARDS)
    double = min(first)
    save_file(second | {double: first[double] * 0.5}, part / SHARDS[1])
    for message in refusals(folder):
        assert f"{part / SHARDS[1]}: holds {double}, which" in message
        assert f"gives to {SHARDS[0]}" in message


def test_a_file_and_an_index_are_not_chosen_between(
    folder: Path, true_weights: dict[str, Tensor]
) -> None:
    part = folder / "transformer"
    reshard(part, STEM)
    save_file(halved(true_weights), part / f"{STEM}.safetensors")
    for message in refusals(folder):
        assert f"{STEM}.safetensors.index.json lies beside it, and either could be meant" in message


@pytest.mark.parametrize("sharded", [False, True])
def test_a_variant_is_chosen_by_the_setting(
    folder: Path, true_weights: dict[str, Tensor], sharded: bool
) -> None:
    part = folder / "transformer"
    half = halved(true_weights)
    if sharded:
        names = [f"{STEM}.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
        weight_map = {name: names[n % 2] for n, name in enumerate(sorted(half))}
        for file in names:
            held = {name: half[name] for name in half if weight_map[name] == file}
            save_file(held, part / file, {"format": "pt"})
        index = part / f"{STEM}.safetensors.index.fp16.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        save_file(half, part / f"{STEM}.fp16.safetensors", {"format": "pt"})
    for found in read_both_ways(folder, "fp16"):
        assert all(torch.equal(found[name], t) for name, t in half.items())
    for found in read_both_ways(folder):
        assert all(torch.equal(found[name], t) for name, t in true_weights.items())
    # Parts without this variant have their plain files.
    check_model(tiny_config(folder, f"model.path={folder}", "model.variant=fp16"))
    load_part(ModelSection(path=str(folder), variant="fp16"), "text_encoder", torch.float32)


def test_where_only_variants_are_the_setting_is_named(folder: Path) -> None:
    part = folder / "transformer"
    (part / f"{STEM}.safetensors").rename(part / f"{STEM}.fp16.safetensors")
    for message in refusals(folder):
        assert f"no {STEM}.safetensors there, only the variants fp16" in message
        assert "model.variant=fp16" in message


def test_shards_without_an_index_are_named(folder: Path) -> None:
    part = folder / "transformer"
    reshard(part, STEM)
    (part / f"{STEM}.safetensors.index.json").unlink()
    for message in refusals(folder):
        assert f"nor its index {STEM}.safetensors.index.json, which says what of" in message
        assert SHARDS[0] in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_quantised_weights_are_refused_before_anything_is_loaded(
    folder: Path, part: str, dtype: torch.dtype
) -> None:
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    save_file(tensors | {name: tensors[name].to(dtype)}, file, {"format": "pt"})
    with pytest.raises(ModelFolderError, match="quantised files cannot be used") as caught:
        check_model(tiny_config(folder / "run", f"model.path={folder}"))
    assert f"{file}: {name} holds " in str(caught.value)
    with pytest.raises(ModelFolderError, match="quantised files cannot be used"):
        load_part(ModelSection(path=str(folder)), part, torch.float32)


def test_whole_numbers_that_are_no_weights_may_be_there(folder: Path) -> None:
    file = folder / "text_encoder" / "model.safetensors"
    positions = {"text_model.embeddings.position_ids": torch.arange(12)[None]}
    save_file(load_file(file) | positions, file, {"format": "pt"})
    check_model(tiny_config(folder / "run", f"model.path={folder}"))
    load_part(ModelSection(path=str(folder)), "text_encoder", torch.float32)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    network = load_part(ModelSection(path="tiny_world:flux"), "transformer", torch.float32)
    with pytest.raises(ModelFolderError, match="no such file or folder"):
        load_transformer_weights(network, tmp_path / "nowhere")
