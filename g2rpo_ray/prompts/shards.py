"""One shard of embeddings: encoded and written by a Ray Data worker."""

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from g2rpo_ray.common.device import role_device
from g2rpo_ray.config import Config
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.embeddings import prompt_checksum, stacked


class ShardEncoder:
    """Holds the text encoders; a call encodes one shard. Ray Data makes actors of it."""

    def __init__(self, config: Config, folder: Path, gpus: float) -> None:
        torch.set_num_threads(config.rollout.threads)
        device = role_device(gpus, "--gpus-per-worker").type
        self._encoder = TextEncoder(config.model, config.prompts.max_sequence_length, device)
        self._folder = folder

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """``{shard, texts}`` -> ``{shard, file, prompts, bytes, sha256, checksums, seconds}``.

        Prompts are encoded one at a time, so the numbers are those that training on the fly gets.
        """
        started_s = time.perf_counter()
        embeds = [self._encoder.encode(str(text)) for text in row["texts"]]
        path = self._folder / f"shard_{row['shard']:05d}.safetensors"
        temporary = path.with_name(f".{path.name}.writing")
        content = save(stacked(embeds))
        temporary.write_bytes(content)
        temporary.rename(path)
        return {
            "shard": row["shard"],
            "file": path.name,
            "prompts": len(embeds),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "checksums": [prompt_checksum(e) for e in embeds],
            "seconds": time.perf_counter() - started_s,
        }
