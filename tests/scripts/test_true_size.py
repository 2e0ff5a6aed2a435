"""scripts/true_size.py: the files that it writes are taken by what reads the real ones."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import open_clip
import pytest
import torch

from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.families import FAMILIES, open_family
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.flux2.family import Flux2
from g2rpo_ray.models.loading import load_part
from g2rpo_ray.models.sd3.family import CLIP_TOKENS, Sd3
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.plan.encoding import NOT_MULTIPLIED
from g2rpo_ray.prompts.embeddings import Embeddings
from g2rpo_ray.rewards.scorers.clip import ClipScorer
from tests.models.families.folders import TINY, family_config, tiny_folder
from tests.scripts.loading import SCRIPTS, load_script

CLIP: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
SMALL: dict[str, dict[str, Any]] = {
    "CLIP-L": CLIP | {"projection_dim": 64},
    "CLIP-G": CLIP | {"projection_dim": 64},
    "T5-XXL": {"d_model": 128, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    "Qwen3-4B": TEXT | {"head_dim": 16},
    "Qwen2.5-VL-7B": {
        "text_config": TEXT | MROPE,
        "vision_config": VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64},
    },
    "Mistral-Small-24B": {
        "text_config": TEXT | {"head_dim": 16},
        "vision_config": VISION
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
    },
}
"""Changed sizes of text encoders; their vocabularies stay."""


@pytest.fixture
def true_size(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("true_size")


@pytest.fixture
def small(true_size: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    known = true_size.TEXT_ENCODERS["sizes"]
    for name, sizes in SMALL.items():
        nested = {k: known[name][k] | v for k, v in sizes.items() if isinstance(v, dict)}
        monkeypatch.setitem(known, name, known[name] | sizes | nested)
    return true_size


def test_a_folder_is_read_as_a_published_one(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "SHARD_BYTES", {"transformer": 2_000_000})
    published = next(iter(Flux1.published.values())).configs
    heads = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2}
    text = {"joint_attention_dim": 128, "pooled_projection_dim": 64}
    configs = published | {
        "transformer": published["transformer"] | heads | text,
        "vae": published["vae"] | {"block_out_channels": [32] * 4},
    }
    small.write_model(tmp_path, Flux1(configs))

    index = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values())
    assert len(files) > 1
    assert files == {path.name for path in index.parent.glob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY.keys() - {"flux1_schnell", "flux2_klein_distilled"}))
def test_a_folder_of_every_family_is_read(small: ModuleType, tmp_path: Path, name: str) -> None:
    """Networks of the tiny folders' sizes beside tokenizers of true size."""
    tiny = open_family(tiny_folder(name))
    small.write_model(tmp_path / "model", tiny)
    (tmp_path / "model" / "call.json").write_text(json.dumps(tiny.configs.get("call", {})))
    model = ModelSection(path=str(tmp_path / "model"))
    for part in ("transformer", "vae"):
        load_part(model, part, torch.bfloat16)
    encoder = TextEncoder(model, 512)
    one, other = (encoder.encode(text).tensors for text in ("a lighthouse", "a storm at sea"))
    assert all(tensor.isfinite().all() for tensor in one.values())
    same = [k for k in one if one[k].shape == other[k].shape and torch.equal(one[k], other[k])]
    assert not set(same) - {"mask"}


def test_random_embeddings_are_those_of_the_model(true_size: ModuleType, tmp_path: Path) -> None:
    config = family_config("sd3", "prompts.max_sequence_length=8")
    true_size.write_embeddings(config, tmp_path / "embedded", ["a storm", "a lighthouse"])
    embeddings = Embeddings(tmp_path / "embedded")
    embeddings.check_encoder(config)
    assert not torch.equal(embeddings.negative["joint"], embeddings.embeds("a storm")["joint"])
    assert embeddings.embeds("a lighthouse")["joint"].shape[0] == CLIP_TOKENS + 8


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
    """Its text encoders are as wide as every published transformer of it takes them."""
    for kind in FAMILIES:
        for published in kind.published.values():
            family = kind(published.configs)
            network = published.configs["transformer"]
            parts = [part for part in family.parts if part.startswith("text_encoder")]
            config = true_size.text_encoder_on_meta(family, parts[-1]).config
            counted = [true_size.text_encoder_on_meta(family, part) for part in parts]
            assert published.text_parameters == sum(
                tensor.numel()
                for encoder in counted
                for name, tensor in encoder.named_parameters()
                if not any(word in name for word in NOT_MULTIPLIED)
            )
            width = network.get("cap_feat_dim") or network["joint_attention_dim"]
            # FLUX.2 joins three layers.
            layers = 3 if issubclass(kind, Flux2) else 1
            assert layers * config.get_text_config().hidden_size == width
            if issubclass(kind, Sd3):
                clip = [true_size.text_encoder_on_meta(family, part) for part in parts[:2]]
                sizes = sum(encoder.config.projection_dim for encoder in clip)
                assert sizes == network["pooled_projection_dim"]
