"""The tokenizers: a byte-level BPE for both CLIP models and a word-level Unigram for T5."""

import itertools
import string
from collections import Counter

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, T5Tokenizer

from g2rpo_ray.tiny_world.scene import all_captions

CLIP_LENGTH = 12  # tokens: start, at most eight words, end, and two to spare
T5_LENGTH = 10  # tokens: at most eight words and the end

_END_OF_WORD = "</w>"


def caption_words() -> list[str]:
    """The words of all captions, sorted."""
    return sorted({word for caption in all_captions() for word in caption.split()})


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges that make one token of every word, the most frequent pair first."""
    pieces = [(*word[:-1], word[-1] + _END_OF_WORD) for word in words]
    merges = []
    while any(len(word) > 1 for word in pieces):
        pairs = Counter(pair for word in pieces for pair in itertools.pairwise(word))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        pieces = [_merge(word, best) for word in pieces]
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return tuple(merged)


def clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """CLIP's vocabulary in small: all bytes, all bytes at a word's end, merges, start, end.

    Args:
        pad_token: "<|endoftext|>" as FLUX pads, or "!" (id 0), with which open_clip finds the
            end of the text as the largest id.
    """
    merges = learn_merges(caption_words())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [
        *alphabet,
        *(letter + _END_OF_WORD for letter in alphabet),
        *(first + second for first, second in merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        pad_token=pad_token,
        model_max_length=CLIP_LENGTH,
    )


def t5_tokenizer() -> T5Tokenizer:
    """T5's vocabulary in small: one token a word, letters for whatever else is typed."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -3.0) for word in caption_words()]
    pieces += [(letter, -6.0) for letter in string.ascii_lowercase]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_LENGTH)
