"""Prompts to conditioning, as diffusers' own pipeline of the model computes it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from unicodedata import normalize

import torch

from g2rpo_ray.common.device import compute_the_same_bits
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.loading import DTYPES, load_part


class TextEncoder:
    """A pipeline of which the text encoders alone are loaded.

    Prompts are encoded one at a time: their conditioning is a function of the text alone.
    """

    def __init__(
        self,
        model: ModelSection,
        max_sequence_length: int,
        device: str = "cpu",
        negative: str | None = None,
    ) -> None:
        """``negative`` is that of ``families.negative_prompt``, encoded once."""
        # What is cut is told by ``cut``: a line for each text would drown everything else.
        for library in ("diffusers.pipelines", "transformers.tokenization_utils_base"):
            logging.getLogger(library).setLevel(logging.ERROR)
        if model.deterministic:
            compute_the_same_bits()
        self._family, self._length = open_family(resolve_path(model.path)), max_sequence_length
        parts = {
            part: load_part(model, part, DTYPES[model.dtype], device)
            for part in self._family.encoder_parts
        }
        self._pipeline = self._family.pipeline_class(
            transformer=None, vae=None, scheduler=None, **parts
        )

        self.negative = None if negative is None else self._encode(negative)
        """Conditioning of the negative prompt."""

    def encode(self, text: str) -> Conditioning:
        """Of one prompt, on the CPU; longer texts are cut to the encoders' lengths."""
        return replace(self._encode(text), negative=self.negative)

    def cut(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each of the texts that has too many."""
        # No tokenizer makes more tokens than bytes of what it normalizes, and a mark of a word's
        # start; the rest is what the pipeline adds.
        most = self._length - 1 - self._family.text_tokens(self._pipeline, "")
        long = [text for text in texts if len(normalize("NFKC", text).encode()) > most]
        tokens = [self._family.text_tokens(self._pipeline, text) for text in long]
        return [size for size in tokens if size > self._length]

    @torch.no_grad()  # not inference_mode: the learner's graph takes embeddings in
    def _encode(self, text: str) -> Conditioning:
        encoded = self._family.encode(self._pipeline, text, self._length)
        return encoded.to(torch.device("cpu"))
