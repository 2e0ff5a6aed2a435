"""Small models in the real file formats, made by a test."""

import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel

from build_tiny_scorers import write_pickscore


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
    write_pickscore(folder, CLIPModel(config))
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
