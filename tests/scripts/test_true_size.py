"""scripts/true_size.py: the files that it writes are taken by what reads the real ones."""

import json
from pathlib import Path
from types import ModuleType

import open_clip
import pytest
import torch

from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.families import FAMILIES
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.loading import load_part
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.rewards.scorers.clip import ClipScorer
from tests.scripts.loading import SCRIPTS, load_script

SMALL = {
    "CLIPTextModel": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "T5EncoderModel": {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4},
}


@pytest.fixture
def true_size(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("true_size")


def test_a_folder_is_read_as_a_published_one(
    true_size: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, sizes in SMALL.items():
        monkeypatch.setitem(true_size.TEXT_ENCODERS, kind, true_size.TEXT_ENCODERS[kind] | sizes)
    monkeypatch.setattr(true_size, "SHARD_BYTES", {"transformer": 2_000_000})
    published = next(iter(Flux1.published.values())).configs
    heads = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2}
    text = {"joint_attention_dim": 64, "pooled_projection_dim": 64}
    configs = published | {
        "transformer": published["transformer"] | heads | text,
        "vae": published["vae"] | {"block_out_channels": [32] * 4},
    }
    true_size.write_model(tmp_path, Flux1(configs))

    index = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values())
    assert len(files) > 1
    assert files == {path.name for path in index.parent.glob("*.safetensors")}
    model = ModelSection(path=str(tmp_path))
    for part in ("transformer", "vae"):
        load_part(model, part, torch.bfloat16)
    encoder = TextEncoder(model, 512)
    one, other = (encoder.encode(text) for text in ("a lighthouse", "a storm at sea"))
    for name in ("t5", "pooled"):
        assert one[name].isfinite().all()
        assert not torch.equal(one[name], other[name])


def test_a_scorer_reads_its_folder(
    true_size: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = open_clip.get_model_config("ViT-S-32-alt")
    monkeypatch.setattr(open_clip, "get_model_config", lambda _: small)
    on_meta = true_size.open_clip_on_meta
    monkeypatch.setattr(true_size, "open_clip_on_meta", lambda _: on_meta("ViT-S-32-alt"))
    true_size.write_clip(tmp_path / "DFN5B-CLIP-ViT-H-14")
    options = ClipScorer.Options(architecture=f"local-dir:{tmp_path}/DFN5B-CLIP-ViT-H-14")
    pictures = torch.randint(0, 255, (2, 64, 64, 3), dtype=torch.uint8)
    scores = ClipScorer(options, "cpu").score(pictures, ["a cat", "a dog"])
    assert scores[0] != scores[1]


def test_every_family_can_be_written(true_size: ModuleType) -> None:
    for family in FAMILIES:
        for part, kind in family.parts.items():
            if part.startswith("text_encoder"):
                true_size.text_encoder_on_meta(kind)
