"""Who encodes prompts: a run's one actor, and the Ray Data workers of ``g2rpo embed``."""

import hashlib
import time
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from g2rpo_ray.common.device import role_device
from g2rpo_ray.common.files import replacing
from g2rpo_ray.config import Config
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import negative_prompt
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import Prompt, open_embeddings
from g2rpo_ray.prompts.embeddings import NEGATIVE_FILE, prompt_checksum, stacked

CACHED_PROMPTS = 256


class PromptEncoder:
    """Holds the text encoders, so that no other role needs their memory. Embeddings that lie on the
    disk already are read."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.rollout.threads)
        self._config, self._negative = config, negative_prompt(config)
        opened = [open_embeddings(path) for path in (config.prompts.train, config.prompts.heldout)]
        self._embedded = [embeddings for embeddings in opened if embeddings]
        self._encode = lru_cache(CACHED_PROMPTS)(self._embeds)

    def encode(self, prompt_id: int, text: str) -> Prompt:
        return Prompt(prompt_id, text, self._encode(text))

    def _embeds(self, text: str) -> Conditioning:
        for embeddings in self._embedded:
            if text in embeddings:
                negative = None if self._negative is None else embeddings.negative
                return replace(embeddings.embeds(text), negative=negative)
        return self._encoder.encode(text)

    @cached_property
    def _encoder(self) -> TextEncoder:
        """Loaded when a prompt first needs it: never, if all of them were embedded before."""
        prompts = self._config.prompts
        device = role_device(prompts.encoder_gpus, "prompts.encoder_gpus")
        length = prompts.max_sequence_length
        return TextEncoder(self._config.model, length, device.type, self._negative)


class ShardEncoder:
    """Holds the text encoders; a call encodes and writes one shard. Ray Data makes actors of it."""

    def __init__(self, config: Config, folder: Path, gpus: float) -> None:
        torch.set_num_threads(config.rollout.threads)
        device = role_device(gpus, "--gpus-per-worker").type
        length, negative = config.prompts.max_sequence_length, negative_prompt(config)
        self._encoder = TextEncoder(config.model, length, device, negative)
        self._folder = folder

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """``{shard, texts}`` -> ``{shard, file, prompts, bytes, sha256, checksums, seconds}``.

        Prompts are encoded one at a time, so the numbers are those that training on the fly gets.
        """
        started_s = time.perf_counter()
        negative = self._encoder.negative
        if negative is not None:
            _write(self._folder / NEGATIVE_FILE, save(dict(negative.tensors)))
        embeds = [self._encoder.encode(str(text)) for text in row["texts"]]
        path = self._folder / f"shard_{row['shard']:05d}.safetensors"
        content = save(stacked(embeds))
        _write(path, content)
        return {
            "shard": row["shard"],
            "file": path.name,
            "prompts": len(embeds),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "checksums": [prompt_checksum(e) for e in embeds],
            "negative_checksum": negative and prompt_checksum(negative),
            "seconds": time.perf_counter() - started_s,
        }


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
