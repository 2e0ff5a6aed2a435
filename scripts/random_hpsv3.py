"""Random weights in the files of HPSv3 and of Qwen2-VL, small or of true size."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from g2rpo_ray.rewards.scorers.hpsv3 import QUESTION

MARKERS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{% for part in "
    "message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What Qwen2-VL's own template makes of a picture and a question."""


def write_tokenizer(folder: Path, vocabulary: int = 400, markers: int = len(MARKERS)) -> int:
    """A small tokenizer in the files that Qwen2-VL's has; its number of tokens.

    Args:
        vocabulary: most tokens beside the first ``markers`` of MARKERS.
    """
    known = MARKERS[:markers]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLITS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([QUESTION.read_text(), "a red fox in the snow"], trainer)
    tokenizer.add_special_tokens([AddedToken(it, special=True) for it in known])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>", "bos_token": None,
        "eos_token": "<|im_end|>", "unk_token": None, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "model_max_length": 32768,
        "chat_template": TEMPLATE,
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


SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_window_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2,
                      "hidden_size": 64},
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "max_window_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16,
                      "hidden_size": 3584},
}  # fmt: skip
"""Qwen2-VL-7B-Instruct's."""


def write_hpsv3(
    folder: Path, sizes: dict[str, Any] = SMALL, vocabulary: int = 400, device: str = "cpu"
) -> dict[str, Any]:
    """Checkpoint, configuration and tokenizer; the scorer's options.

    Args:
        device: on which the numbers are drawn.
    """
    tokens = write_tokenizer(folder, vocabulary)
    first = tokens - len(MARKERS)
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
        "attention_dropout": 0.0, "bos_token_id": first, "eos_token_id": first + 2,
        "vision_start_token_id": first + 3, "vision_end_token_id": first + 4,
        "vision_token_id": first + 5, "image_token_id": first + 6, "video_token_id": first + 7,
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": tokens + 7,
    } | sizes  # fmt: skip
    config["vision_config"] = {
        "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    } | sizes["vision_config"]  # fmt: skip
    preprocessing = {
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2,
        "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    save_file(random_state(tokens + 1, sizes, device), folder / "HPSv3.safetensors")
    return {"checkpoint": str(folder / "HPSv3.safetensors"), "base": str(folder)}


def random_state(rows: int, sizes: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Weights under the checkpoint's names, of a size at which a score depends on all of them."""
    generator = torch.Generator(device).manual_seed(3)
    seen, width, inner = sizes["vision_config"], sizes["hidden_size"], sizes["intermediate_size"]
    patch, merged = seen["embed_dim"], 4 * seen["embed_dim"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]

    def matrix(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return (values / values[0].numel() ** 0.5).bfloat16()

    def bias(size: int) -> torch.Tensor:
        return (0.1 * torch.randn(size, generator=generator, device=device)).bfloat16()

    def linear(name: str, given: int, taken: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": matrix(given, taken), f"{name}.bias": bias(given)}

    def norm(name: str, size: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + bias(size), f"{name}.bias": bias(size)}

    state = {"visual.patch_embed.proj.weight": matrix(patch, 3, 2, 14, 14)}
    for it in (f"visual.blocks.{number}" for number in range(seen["depth"])):
        state |= norm(f"{it}.norm1", patch) | norm(f"{it}.norm2", patch)
        state |= linear(f"{it}.attn.qkv", 3 * patch, patch)
        state |= linear(f"{it}.attn.proj", patch, patch)
        state |= linear(f"{it}.mlp.fc1", seen["mlp_ratio"] * patch, patch)
        state |= linear(f"{it}.mlp.fc2", patch, seen["mlp_ratio"] * patch)
    state |= norm("visual.merger.ln_q", patch)
    state |= linear("visual.merger.mlp.0", merged, merged)
    state |= linear("visual.merger.mlp.2", width, merged)
    state["model.embed_tokens.weight"] = 8 * matrix(rows, width)
    for it in (f"model.layers.{number}" for number in range(sizes["num_hidden_layers"])):
        for part, given in (("q", width), ("k", keys), ("v", keys)):
            state |= linear(f"{it}.self_attn.{part}_proj", given, width)
        state[f"{it}.self_attn.o_proj.weight"] = matrix(width, width)
        for part, given, taken in (("gate", inner, width), ("up", inner, width),
                                   ("down", width, inner)):  # fmt: skip
            state[f"{it}.mlp.{part}_proj.weight"] = matrix(given, taken)
        for part in ("input", "post_attention"):
            state[f"{it}.{part}_layernorm.weight"] = 1 + bias(width)
    state["model.norm.weight"] = 1 + bias(width)
    state["lm_head.weight"] = matrix(rows, width)
    for place, given, taken in ((0, 1024, width), (3, 16, 1024), (5, 2, 16)):
        layer = linear(f"rm_head.{place}", given, taken)
        state |= {name: 4 * tensor.float() for name, tensor in layer.items()}
    return state
