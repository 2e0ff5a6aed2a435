"""Small models in the real file formats, made by a test."""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
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
from g2rpo_ray.rewards.scorers.hpsv3 import QUESTION

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


QWEN_MARKERS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
QWEN_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{% for part in "
    "message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What Qwen2-VL's own template makes of a picture and a question."""


def write_qwen_tokenizer(folder: Path, markers: int = len(QWEN_MARKERS)) -> int:
    """A small tokenizer in the files that Qwen2-VL's has; its number of tokens."""
    known = QWEN_MARKERS[:markers]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_SPLITS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([QUESTION.read_text(), "a red fox in the snow"], trainer)
    tokenizer.add_special_tokens([AddedToken(it, special=True) for it in known])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>", "bos_token": None,
        "eos_token": "<|im_end|>", "unk_token": None, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "model_max_length": 32768,
        "chat_template": QWEN_TEMPLATE,
        "additional_special_tokens": list(known[1:]),
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(it)): {
                "content": it, "lstrip": False, "normalized": False, "rstrip": False,
                "single_word": False, "special": True,
            } for it in known
        },
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = json.loads(tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    merges = [" ".join(it) if isinstance(it, list) else it for it in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return tokenizer.get_vocab_size()


def hpsv3_options(folder: Path) -> dict[str, Any]:
    """HPSv3's checkpoint and Qwen2-VL's other files, as published but small and random."""
    tokens = write_qwen_tokenizer(folder)
    first = tokens - len(QWEN_MARKERS)
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
        "attention_dropout": 0.0, "bos_token_id": first, "eos_token_id": first + 2,
        "vision_start_token_id": first + 3, "vision_end_token_id": first + 4,
        "vision_token_id": first + 5, "image_token_id": first + 6, "video_token_id": first + 7,
        "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
        "intermediate_size": 96, "max_position_embeddings": 32768, "max_window_layers": 2,
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": tokens + 7,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {
            "depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3,
            "hidden_size": 64, "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    }  # fmt: skip
    preprocessing = {
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
        "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    save_file(hpsv3_state(tokens + 1), folder / "HPSv3.safetensors")
    return {"checkpoint": str(folder / "HPSv3.safetensors"), "base": str(folder)}


def hpsv3_state(rows: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Random weights of ``hpsv3_options``, of a size at which a score depends on all of them."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return (values / values[0].numel() ** 0.5).bfloat16()

    def bias(size: int) -> torch.Tensor:
        return (0.1 * torch.randn(size, generator=generator)).bfloat16()

    def linear(name: str, given: int, taken: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": matrix(given, taken), f"{name}.bias": bias(given)}

    def norm(name: str, size: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + bias(size), f"{name}.bias": bias(size)}

    state = {"visual.patch_embed.proj.weight": matrix(32, 3, 2, 14, 14)}
    for it in ("visual.blocks.0", "visual.blocks.1"):
        state |= norm(f"{it}.norm1", 32) | norm(f"{it}.norm2", 32)
        state |= linear(f"{it}.attn.qkv", 96, 32) | linear(f"{it}.attn.proj", 32, 32)
        state |= linear(f"{it}.mlp.fc1", 64, 32) | linear(f"{it}.mlp.fc2", 32, 64)
    state |= norm("visual.merger.ln_q", 32)
    state |= linear("visual.merger.mlp.0", 128, 128) | linear("visual.merger.mlp.2", 64, 128)
    state["model.embed_tokens.weight"] = 8 * matrix(rows, 64)
    for it in ("model.layers.0", "model.layers.1"):
        for part, given in (("q", 64), ("k", 32), ("v", 32)):
            state |= linear(f"{it}.self_attn.{part}_proj", given, 64)
        state[f"{it}.self_attn.o_proj.weight"] = matrix(64, 64)
        for part, given, taken in (("gate", 96, 64), ("up", 96, 64), ("down", 64, 96)):
            state[f"{it}.mlp.{part}_proj.weight"] = matrix(given, taken)
        for part in ("input", "post_attention"):
            state[f"{it}.{part}_layernorm.weight"] = 1 + bias(64)
    state["model.norm.weight"] = 1 + bias(64)
    state["lm_head.weight"] = matrix(rows, 64)
    for place, given, taken in ((0, 1024, 64), (3, 16, 1024), (5, 2, 16)):
        layer = linear(f"rm_head.{place}", given, taken)
        state |= {name: 4 * tensor.float() for name, tensor in layer.items()}
    return state
