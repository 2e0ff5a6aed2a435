"""How many tokens a text has before a pipeline cuts it: as each pipeline itself counts them."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import cut_words
from tests.models.families.folders import TINY, family_config, tiny_folder
from tests.tiny import CAPTIONS


@pytest.mark.parametrize("name", TINY)
def test_tokens_are_counted_as_the_pipeline_counts_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, most = family_config(name).model, 900
    encoder = TextEncoder(config, most)
    pipeline, seen = encoder._pipeline, []
    call = PreTrainedTokenizerBase.__call__

    def counted(self: Any, *args: Any, **settings: Any) -> Any:
        found = call(self, *args, **settings)
        if (settings.get("max_length") or 0) >= most:
            seen.append(int(torch.as_tensor(found["attention_mask"]).sum()))
        return found

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counted)
    family = open_family(tiny_folder(name))
    dropped = getattr(pipeline, "prompt_template_encode_start_idx", 0)
    for text in ("", *CAPTIONS[:2], 40 * CAPTIONS[0]):
        seen.clear()
        encoder.encode(text)
        (tokens,) = seen
        assert family.text_tokens(pipeline, text) == tokens - dropped


@pytest.mark.parametrize("name", TINY)
def test_what_is_cut_is_told_by_its_tokens(name: str) -> None:
    config = family_config(name).model
    encoder = TextEncoder(config, 900)
    family = open_family(tiny_folder(name))
    fits, long = CAPTIONS[0], f"{CAPTIONS[0]} and {CAPTIONS[0]}"
    encoder._length, size = (family.text_tokens(encoder._pipeline, text) for text in (fits, long))
    assert encoder.cut([fits, long]) == [size]
    assert encoder.cut([fits]) == []
    # A token for each of its letters, and for T5 one more before them.
    letters = "zqxjzqxj"
    encoder._length = family.text_tokens(encoder._pipeline, letters) - 1
    assert encoder.cut([letters]) == [encoder._length + 1]


def test_the_words_say_how_many_the_longest_and_the_setting() -> None:
    assert cut_words([], 5, 512) == ""
    words = cut_words([600, 733], 5, 512)
    assert words.startswith("2 of 5 prompts are cut: up to 733 tokens")
    assert "prompts.max_sequence_length is 512" in words
    assert cut_words([733], 1, 512).startswith("the prompt is cut: 733 tokens")
