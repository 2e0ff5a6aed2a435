"""Small models in the real file formats, made by a test."""

import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2ImageProcessor,
)

from build_tiny_scorers import write_pickscore
from g2rpo_ray.common.paths import resolve_path

TOWER = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
TEXT = TOWER | {
    "hidden_size": 48, "vocab_size": 567, "bos_token_id": 565, "eos_token_id": 566,
    "pad_token_id": 0,
}  # fmt: skip
"""Of the tiny world's tokenizer."""


def pickscore_options(folder: Path) -> dict[str, Any]:
    """A transformers CLIPModel with tokenizer and preprocessing, as PickScore is laid out."""
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config=TEXT | {"max_position_embeddings": 12},
        vision_config=TOWER | {"hidden_size": 64, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
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


def composition_options(folder: Path) -> dict[str, Any]:
    """A transformers OWLv2 model with tokenizer and preprocessing, and the tiny world's CLIP."""
    torch.manual_seed(2)
    config = Owlv2Config(
        text_config=TEXT | {"max_position_embeddings": 16},
        vision_config=TOWER | {"hidden_size": 64, "image_size": 48, "patch_size": 8},
        projection_dim=48,
    )
    model = Owlv2ForObjectDetection(config)
    # As initialised all boxes and all classes are nearly the same.
    for head in (model.class_head, model.box_head):
        for layer in head.children():
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.normal_(layer.weight, std=0.2)
    model.save_pretrained(folder)
    CLIPTokenizer.from_pretrained(resolve_path("tiny_world:clip")).save_pretrained(folder)
    Owlv2ImageProcessor(size={"height": 48, "width": 48}).save_pretrained(folder)
    return {"detector": str(folder), "clip": "local-dir:tiny_world:clip"}
