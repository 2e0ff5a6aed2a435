"""Embeddings that a run keeps in its folder: a file a prompt, found by what made it."""

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from g2rpo_ray.common.files import replacing, writing
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import open_family
from g2rpo_ray.prompts.embeddings import encoder_fingerprint, prompt_checksum

logger = logging.getLogger(__name__)

KEPT = "embeddings"
"""Folder inside a run's, or inside an evaluation's."""


class KeptEmbeddings:
    """Of texts that are needed again and again.

    A file's name hangs on the text, the encoders, their precision and length: one of other encoders
    or settings is never found. What is in it is compared with its checksum.
    """

    def __init__(self, folders: Sequence[Path], config: Config) -> None:
        """Folders are looked through in their order; the last is written to."""
        self._folders, self._config = folders, config

    @cached_property
    def _made_by(self) -> str:
        model = self._config.model
        family = open_family(resolve_path(model.path)).pipeline
        length = self._config.prompts.max_sequence_length
        return json.dumps([family, encoder_fingerprint(model), model.dtype, length])

    def _file(self, text: str) -> str:
        name = hashlib.sha256(json.dumps([self._made_by, text]).encode()).hexdigest()
        return f"{name[:32]}.safetensors"

    def has(self, text: str) -> bool:
        """Whether there is a file of it, damaged or not."""
        return any((folder / self._file(text)).is_file() for folder in self._folders)

    def get(self, text: str) -> Conditioning | None:
        """Without a negative prompt's; None where there is none, or a damaged one."""
        for path in (folder / self._file(text) for folder in self._folders):
            if not path.is_file():
                continue
            try:
                with safe_open(path, framework="pt") as file:
                    names = file.keys()
                    embeds = Conditioning({name: file.get_tensor(name) for name in names})
                    checksum = (file.metadata() or {}).get("checksum")
            except (OSError, SafetensorError) as error:
                logger.warning("%s: damaged, it is made again: %s", path, error)
                continue
            if prompt_checksum(embeds) == checksum:
                return embeds
            logger.warning("%s: damaged, it is made again: its checksum differs", path)
        return None

    def keep(self, text: str, embeds: Conditioning) -> None:
        """Raises DiskError where the disk is full or read-only."""
        path = self._folders[-1] / self._file(text)
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in embeds.tensors.items()}
        content = save(tensors, {"text": text, "checksum": prompt_checksum(embeds)})
        with replacing(path) as temporary:
            temporary.write_bytes(content)
