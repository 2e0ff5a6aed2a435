"""Model folders: every way in which one cannot be used is named with its part and cause."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.loading import check_model, load_part
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.tokenizers import load_part_tokenizer
from g2rpo_ray.plan.networks import policy_size
from tests.tiny import copy_flux, tiny_config

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
CLIP = "text_encoder/model.safetensors"
T5 = "text_encoder_2/model.safetensors"
WEIGHT_FILES = [TRANSFORMER, VAE, CLIP, T5]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_flux(tmp_path / "flux")


def check_error(folder: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        check_model(tiny_config(folder / "run", f"model.path={folder}"))
    return str(caught.value)


def load_error(folder: Path, weight_file: str) -> str:
    part = weight_file.partition("/")[0]
    with pytest.raises(ModelFolderError) as caught:
        load_part(ModelSection(path=str(folder)), part, torch.float32)
    assert str(folder / part) in str(caught.value)
    return str(caught.value)


def test_the_tiny_model_is_complete(tmp_path: Path) -> None:
    check_model(tiny_config(tmp_path, "model.path=tiny_world:flux"))


def test_missing_folder_is_named_as_given_and_as_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFolderError) as caught:
        check_model(tiny_config(tmp_path, "model.path=models/flux"))
    assert f"'models/flux': no such folder ({tmp_path}/models/flux)" in str(caught.value)


def test_folder_of_another_kind(tmp_path: Path) -> None:
    assert f"{tmp_path}: no model_index.json" in check_error(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_broken_index(folder: Path, text: str) -> None:
    (folder / "model_index.json").write_text(text)
    message = check_error(folder)
    assert f"{folder}/model_index.json" in message
    assert "JSON" in message


@pytest.mark.parametrize("name", ["KolorsPipeline", "", None])
def test_a_family_that_is_not_known(folder: Path, name: str | None) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": name}))
    message = check_error(folder)
    assert f"{path}: _class_name is {name!r}" in message
    assert "known here: FluxPipeline" in message
    with pytest.raises(ModelFolderError, match="known here: FluxPipeline"):
        load_policy(tiny_config(folder / "run", f"model.path={folder}"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("sampling.height=72", "sampling.height is 72"),
        ("sampling.width=40", "sampling.width is 40"),
        ("evaluation.height=1000", "evaluation.height is 1000"),
    ],
)
def test_a_size_that_the_model_cannot_draw(tmp_path: Path, override: str, named: str) -> None:
    config = tiny_config(tmp_path, override)
    for check in (check_model, load_policy, policy_size):
        with pytest.raises(ModelFolderError, match=f"{named}; it must be a multiple of 16"):
            check(config)


@pytest.mark.parametrize("part", Flux1.parts)
def test_missing_part(folder: Path, part: str) -> None:
    (folder / part).rename(folder / "elsewhere")
    message = check_error(folder)
    assert f"{folder}: part '{part}' is missing" in message
    assert ", ".join(Flux1.parts) in message


@pytest.mark.parametrize(
    ("part", "entry", "found"),
    [
        ("transformer", ["diffusers", "SD3Transformer2DModel"], "SD3Transformer2DModel"),
        ("vae", ["diffusers", "AutoencoderTiny"], "AutoencoderTiny"),
        ("text_encoder_2", None, "missing entry"),
        ("text_encoder", "CLIPTextModel", "missing entry"),
    ],
)
def test_part_of_another_class(folder: Path, part: str, entry: object, found: str) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: entry}))
    message = check_error(folder)
    assert f"{path}: part '{part}' is a {found}" in message
    assert Flux1.parts[part] in message


@pytest.mark.parametrize(
    ("part", "change", "found"),
    [
        # FLUX.1-Fill-dev takes the picture, the masked one and the mask.
        (
            "transformer",
            {"in_channels": 384, "out_channels": 64},
            ["in_channels 384", "out_channels 64", "4 x 16 = 64"],
        ),
        ("transformer", {"out_channels": 128}, ["in_channels 64", "out_channels 128"]),
        ("vae", {"latent_channels": 4}, ["in_channels 64", "latent_channels 4", "4 x 4 = 16"]),
    ],
)
def test_a_transformer_of_other_latents_than_the_vaes(
    folder: Path, part: str, change: dict[str, int], found: list[str]
) -> None:
    path = folder / part / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = check_error(folder)
    files = [f"{folder}/{part}/config.json" for part in ("transformer", "vae")]
    assert all(text in message for text in files + found)
    # A role looks for itself, before anything is loaded or made.
    config = tiny_config(folder / "run", f"model.path={folder}", "model.random_weights=true")
    with pytest.raises(ModelFolderError, match="All three must be equal"):
        load_policy(config)


@pytest.mark.parametrize("file", WEIGHT_FILES)
def test_weight_file_cut_short_is_found_before_anything_is_loaded(folder: Path, file: str) -> None:
    path = folder / file
    path.write_bytes(path.read_bytes()[:-1000])
    message = check_error(folder)
    assert str(path) in message
    assert "cut short" in message


@pytest.mark.parametrize("file", WEIGHT_FILES)
def test_missing_weight_file(folder: Path, file: str) -> None:
    (folder / file).unlink()
    stem = Path(file).stem
    for message in (check_error(folder), load_error(folder, file)):
        assert f"no {stem}.safetensors there, nor its index" in message


@pytest.mark.parametrize("file", WEIGHT_FILES)
def test_weights_of_other_shapes(folder: Path, file: str) -> None:
    weights = load_file(folder / file)
    name = max(weights, key=lambda name: weights[name].numel())
    save_file(weights | {name: weights[name][:-1].clone()}, folder / file, {"format": "pt"})
    assert name in load_error(folder, file)


@pytest.mark.parametrize("file", WEIGHT_FILES)
def test_missing_tensors_are_counted_and_named(folder: Path, file: str) -> None:
    weights = load_file(folder / file)
    names = [name for name in weights if name.endswith(("weight", "bias"))][:2]
    kept = {name: tensor for name, tensor in weights.items() if name not in names}
    save_file(kept, folder / file, {"format": "pt"})
    message = load_error(folder, file)
    assert "lack 2 tensors" in message
    assert all(name in message for name in names)


@pytest.mark.parametrize("file", WEIGHT_FILES)
def test_left_over_tensors_are_counted_and_named(folder: Path, file: str) -> None:
    weights = load_file(folder / file)
    save_file(weights | {"another.block.weight": torch.zeros(2)}, folder / file, {"format": "pt"})
    message = load_error(folder, file)
    assert "1 tensors that" in message
    assert "another.block.weight" in message


@pytest.mark.parametrize("part", ["tokenizer", "tokenizer_2"])
def test_a_tokenizer_without_its_vocabulary(folder: Path, part: str) -> None:
    (folder / part / "tokenizer.json").unlink()
    message = check_error(folder)
    assert f"{folder}/{part}: the vocabulary is missing" in message
    with pytest.raises(ModelFolderError, match="the vocabulary is missing"):
        TextEncoder(ModelSection(path=str(folder)), 10)


def test_the_tokenizer_of_another_part(folder: Path) -> None:
    shutil.copy(folder / "tokenizer/tokenizer.json", folder / "tokenizer_2")
    assert f"{folder}/tokenizer_2: its tokenizer cannot be used" in check_error(folder)


def test_a_tokenizer_that_has_forgotten_its_length(folder: Path) -> None:
    # Pipelines pad to that length: 1e30 tokens.
    (folder / "tokenizer/tokenizer_config.json").write_text("{}")
    message = check_error(folder)
    assert f"{folder}/tokenizer/tokenizer_config.json: model_max_length is 1e+30" in message
    assert "text_encoder takes 12 tokens" in message


def test_a_pipeline_that_needs_a_chat_template(folder: Path) -> None:
    class Chatty(Flux1):
        pipeline = "ZImagePipeline"

    family = Chatty(open_family(folder).configs)
    with pytest.raises(ModelFolderError, match="tokenizer: no chat template, which a ZImage"):
        load_part_tokenizer(family, folder / "tokenizer")


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_a_configuration_that_defaults_would_fill_in(folder: Path, part: str) -> None:
    (folder / part / "config.json").write_text("{}")
    assert f"{folder}/{part}/config.json: it is for a nameless model" in check_error(folder)


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_schedule_is_never_another_models(folder: Path, damage: str) -> None:
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text("{}")
    if damage == "missing":
        file.unlink()
    path = f"model.path={folder}"
    check_model(tiny_config(folder / "run", path, "sampling.schedule=static"))
    with pytest.raises(ModelFolderError, match=r"no scheduler/scheduler_config\.json"):
        check_model(tiny_config(folder / "run", path, "sampling.schedule=dynamic"))


def test_pickled_weights_are_not_read(folder: Path) -> None:
    torch.save(load_file(folder / VAE), folder / "vae" / "diffusion_pytorch_model.bin")
    (folder / VAE).unlink()
    assert "no diffusion_pytorch_model.safetensors there" in load_error(folder, VAE)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
@pytest.mark.parametrize(
    ("key", "quantiser"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("quantization_config", {"quant_method": "gguf"}),
        ("compression_config", {"format": "pack-quantized"}),
    ],
)
def test_a_quantised_part_is_refused_with_its_quantiser(
    folder: Path, part: str, key: str, quantiser: dict[str, object]
) -> None:
    path = folder / part / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: quantiser}))
    message = check_error(folder)
    assert f"{path}: {key} names the quantiser" in message
    assert str(next(iter(quantiser.values()))) in message


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("transformer", {"num_layers": "two"}),
        ("transformer", {"attention_head_dim": [8]}),
        ("vae", {"block_out_channels": 8}),
        ("vae", {"down_block_types": ["AnotherBlock"]}),
        ("text_encoder", {"hidden_act": "another"}),
        ("text_encoder", {"num_attention_heads": 0}),
        ("text_encoder_2", {"num_layers": None}),
        ("text_encoder_2", {"d_model": "wide"}),
    ],
)
def test_a_configuration_that_no_network_can_be_made_of(
    folder: Path, part: str, change: dict[str, object]
) -> None:
    path = folder / part / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = check_error(folder)
    assert f"{folder}/{part}: cannot be loaded as {Flux1.parts[part]}" in message
    assert "copy this part again" in message


@pytest.mark.parametrize("error", [ImportError("no such library"), AttributeError("x"), Exception])
def test_whatever_a_library_raises_has_the_parts_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoencoderKL, "from_pretrained", fail)
    message = load_error(folder, VAE)
    assert "cannot be loaded as AutoencoderKL" in message
    assert str(error) in message or "Exception" in message


def test_weights_are_the_files_pages_until_they_are_moved(folder: Path) -> None:
    """No copy in host memory on the way to a card, where the file has the run's dtype."""
    file = folder / TRANSFORMER
    halves = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(halves, file, {"format": "pt"})
    network = load_part(ModelSection(path=str(folder)), "transformer", torch.bfloat16)
    mapped = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(file))
    ]
    places = {name: weight.data_ptr() for name, weight in network.named_parameters()}
    assert places
    copied = [n for n, place in places.items() if not any(place in pages for pages in mapped)]
    assert copied == []
