"""A tiny tokenizer of Qwen's kind, and text encoders for it, of random weights."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from g2rpo_ray.tiny_world.scene import COLOURS, RELATIONS, SHAPES

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tokenizer(known: Sequence[str] = ()) -> Qwen2Tokenizer:
    """With one token for each word of the tiny world's captions and of the texts ``known``."""
    texts = [" ".join(("a", *COLOURS, *SHAPES, *RELATIONS)), "user assistant think"]
    texts += known
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(
        texts * 2,
        trainers.BpeTrainer(
            vocab_size=2000,
            min_frequency=2,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return Qwen2Tokenizer(
        vocab=bpe.get_vocab(),
        merges=[tuple(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]],
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT,
        model_max_length=2048,
    )


def sizes(tokens: int) -> dict[str, int]:
    """Of a text encoder with so many tokens."""
    return {
        "vocab_size": tokens,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "max_position_embeddings": 2048,
    }


def qwen3(tokens: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**sizes(tokens), head_dim=8, tie_word_embeddings=True))
