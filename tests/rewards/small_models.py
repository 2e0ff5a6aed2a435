"""Small models in the real file formats, made by a test."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel

from g2rpo_ray.config import resolve_path

MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


def pickscore_options(folder: Path) -> dict[str, Any]:
    """A transformers CLIPModel with tokenizer and preprocessing, as PickScore is laid out."""
    torch.manual_seed(0)
    tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    config = CLIPConfig(
        text_config=tower
        | {
            "hidden_size": 48, "vocab_size": 567, "max_position_embeddings": 12,
            "bos_token_id": 565, "eos_token_id": 566, "pad_token_id": 0,
        },
        vision_config=tower | {"hidden_size": 64, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )  # fmt: skip
    CLIPModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_path(f"tiny_world:clip/{name}"), folder / name)
    preprocess = {
        "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
        "image_mean": MEAN, "image_std": STD, "resample": 3, "do_resize": True,
        "do_center_crop": True, "do_normalize": True, "do_rescale": True,
        "image_processor_type": "CLIPImageProcessor", "rescale_factor": 1 / 255,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocess))
    return {"path": str(folder)}


def aesthetic_options(folder: Path, widths: tuple[int, ...] = (64, 16, 1)) -> dict[str, Any]:
    """A head laid out like LAION's MLP (``layers.0``, ``layers.2``, ...) on the small CLIP."""
    torch.manual_seed(1)
    state = {}
    for place, (taken, given) in enumerate(itertools.pairwise(widths)):
        state[f"layers.{2 * place}.weight"] = torch.randn(given, taken)
        state[f"layers.{2 * place}.bias"] = torch.randn(given)
    torch.save(state, folder / "head.pth")
    return {"head": str(folder / "head.pth"), "architecture": "local-dir:tiny_world:clip"}
