"""Prompts with their embeddings: read where they lie already, else encoded by one actor."""

from functools import cached_property, lru_cache

import torch

from g2rpo_ray.common.device import role_device
from g2rpo_ray.config import Config
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import Prompt, open_embeddings

CACHED_PROMPTS = 256


class PromptEncoder:
    """Holds the text encoders, so that no other role needs their memory."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.rollout.threads)
        self._config = config
        opened = [open_embeddings(path) for path in (config.prompts.train, config.prompts.heldout)]
        self._embedded = [embeddings for embeddings in opened if embeddings]
        self._encode = lru_cache(CACHED_PROMPTS)(self._embeds)

    def encode(self, prompt_id: int, text: str) -> Prompt:
        return Prompt(prompt_id, text, self._encode(text))

    def _embeds(self, text: str) -> Conditioning:
        for embeddings in self._embedded:
            if text in embeddings:
                return embeddings.embeds(text)
        return self._encoder.encode(text)

    @cached_property
    def _encoder(self) -> TextEncoder:
        """Loaded when a prompt first needs it: never, if all of them were embedded before."""
        prompts = self._config.prompts
        device = role_device(prompts.encoder_gpus, "prompts.encoder_gpus")
        return TextEncoder(self._config.model, prompts.max_sequence_length, device.type)
