"""The shipped models, opened the way a user opens the full-size ones."""

import shutil
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline

from g2rpo_ray.tiny_world import assets_dir
from g2rpo_ray.tiny_world.oracle import check
from g2rpo_ray.tiny_world.scene import all_captions, split_captions
from tiny_world.autoencoder import decode, encode
from tiny_world.pictures import PictureSource
from tiny_world.rewards import Reader, load_clip, load_hps, score
from tiny_world.world import tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def pipeline() -> FluxPipeline:
    pipeline = FluxPipeline.from_pretrained(assets_dir() / "flux")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_the_assets_stay_small() -> None:
    total = sum(file.stat().st_size for file in assets_dir().rglob("*") if file.is_file())
    assert total <= 20_000_000


def test_the_prompt_files_are_the_split() -> None:
    for name, captions in zip(("train", "heldout"), split_captions(seed=0), strict=True):
        text = (assets_dir() / "prompts" / f"{name}.txt").read_text()
        assert text.splitlines() == captions


def test_every_caption_fits_the_tokenizers(pipeline: FluxPipeline) -> None:
    clip = pipeline.tokenizer(all_captions(), padding=True)["input_ids"]
    t5 = pipeline.tokenizer_2(all_captions(), padding=True)["input_ids"]
    assert len(clip[0]) <= pipeline.tokenizer.model_max_length == 12
    assert len(t5[0]) <= pipeline.tokenizer_2.model_max_length == 10
    assert pipeline.tokenizer.unk_token_id not in np.array(clip)[:, 1:4]
    assert pipeline.tokenizer_2.unk_token_id not in np.array(t5)


def test_flux_draws_pictures_that_often_show_their_captions(pipeline: FluxPipeline) -> None:
    assert pipeline.transformer.dtype == pipeline.text_encoder.dtype == torch.float32
    captions = split_captions(seed=0)[1][::9]
    pictures = pipeline(
        captions,
        height=64,
        width=64,
        num_inference_steps=6,
        guidance_scale=3.5,
        max_sequence_length=10,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    shown = check((pictures * 255).round().astype(np.uint8), captions).mean()
    assert 0.3 <= shown <= 0.9  # undertrained on purpose, yet far from chance


def test_the_vae_keeps_what_the_oracle_sees() -> None:
    vae = AutoencoderKL.from_pretrained(assets_dir() / "flux" / "vae").eval()
    source = PictureSource(CPU, seed=21)
    index = source.captions(128)
    with torch.no_grad():
        latents = encode(vae, source.draw(index))
        decoded = torch.cat([decode(vae, part) for part in latents.split(32)])
    assert check(decoded.numpy(), [all_captions()[i] for i in index]).mean() >= 0.98
    assert abs(float(latents.mean())) < 0.1
    assert abs(float(latents.std()) - 1) < 0.1


@pytest.mark.parametrize("name", ["clip", "hps"])
def test_a_reward_model_prefers_the_right_caption(name: str) -> None:
    folder = assets_dir() / name
    model = load_clip(folder, CPU) if name == "clip" else load_hps(folder, CPU)
    source = PictureSource(CPU, seed=22)
    families = source.families(96, 2)
    pictures, reader = source.draw(families[:, 0]), Reader(tiny(), folder, CPU)
    right = score(model, reader, pictures, families[:, 0])
    near_miss = score(model, reader, pictures, families[:, 1])
    flawed = score(model, reader, source.draw_flawed(families[:, 0]), families[:, 0])
    assert (right > near_miss).float().mean() >= 0.95
    assert (right > flawed).float().mean() >= 0.9


def test_the_clip_folder_works_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(assets_dir() / "clip", tmp_path / "moved")
    monkeypatch.chdir("/")
    name = f"local-dir:{tmp_path / 'moved'}"
    model, _, preprocess = open_clip.create_model_and_transforms(name, require_pretrained=True)
    tokens = open_clip.get_tokenizer(name)(["a red circle left of a blue square"])
    assert tokens.shape == (1, 12)
    assert model.encode_text(tokens).shape == (1, 64)
    assert preprocess is not None


def test_the_hps_checkpoint_has_the_shipped_form() -> None:
    checkpoint = torch.load(assets_dir() / "hps" / "HPS_tiny.pt", weights_only=True)
    assert list(checkpoint) == ["state_dict"]
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.float16}
