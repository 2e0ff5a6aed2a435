"""Prompts with their embeddings, encoded on the fly by one Ray actor."""

from functools import lru_cache

import torch

from g2rpo_ray.config import Config
from g2rpo_ray.models.embeds import PromptEmbeds
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import Prompt

CACHED_PROMPTS = 256


class PromptEncoder:
    """Holds the text encoders, so that no other role needs their memory."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.rollout.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        encoder = TextEncoder(config.model, config.prompts.max_sequence_length, device)
        self._encode = lru_cache(CACHED_PROMPTS)(encoder.encode)

    def encode(self, prompt_id: int, text: str) -> Prompt:
        embeds: PromptEmbeds = self._encode(text)
        return Prompt(prompt_id, text, embeds)
