"""A folder of prompt embeddings: its format, its checks, and reading one prompt from it.

``<folder>/``: ``shard_00000.safetensors`` ... with the tensors that the model's family names, each
``[n, ...]``; ``prompts.parquet`` with each prompt's text, shard, row and checksum;
``negative.safetensors`` with those of the negative prompt, where guidance takes one;
``manifest.json``, written last.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from g2rpo_ray.common.files import cause_of, replace_text, sha256_of_file
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, ModelSection
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import negative_prompt, open_family
from g2rpo_ray.models.fingerprint import encoder_part_fingerprint, folder_fingerprint
from g2rpo_ray.models.loading import DTYPES, on_meta
from g2rpo_ray.prompts.formats import PromptFileError
from g2rpo_ray.prompts.reading import MANIFEST, PROMPTS_FILE

FORMAT = "g2rpo embeddings 1"
NEGATIVE_FILE = "negative.safetensors"
LENGTH = ".length"
"""Ends the name of the int64 ``[n]`` with the true lengths of a tensor that some prompts pad."""


@dataclass(frozen=True)
class ShardFile:
    """One file of a folder of embeddings."""

    file: str
    prompts: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What the embeddings are, and what must be there."""

    encoder: dict[str, str]
    """Fingerprint of each part, see ``encoder_fingerprint``."""
    dtype: str
    max_sequence_length: int
    prompts: int
    source: str
    left_out: dict[str, int]
    files: list[ShardFile]
    """The shards, in order."""
    prompts_sha256: str
    """SHA-256 of prompts.parquet."""
    pipeline: str | None = None
    """Family of the model; none in folders of before there were several."""
    negative_prompt: str | None = None
    """Text in negative.safetensors; none where there is no such file."""
    negative_checksum: str | None = None
    """``prompt_checksum`` of it."""


def encoder_fingerprint(model: ModelSection) -> dict[str, str]:
    """Of each part of the text encoders."""
    parts = open_family(resolve_path(model.path)).encoder_parts
    return {part: encoder_part_fingerprint(model, part) for part in parts}


def prompt_checksum(embeds: Conditioning) -> str:
    """Of one prompt's embeddings: 16 hexadecimal digits of SHA-256."""
    digest = hashlib.sha256()
    # Sequences first: the order of folders that were written before tensors had names.
    for _, tensor in sorted(embeds.tensors.items(), key=lambda item: (-item[1].ndim, item[0])):
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def embedding_bytes(config: Config) -> int:
    """Of one prompt that has all its tokens, without a negative one."""
    family, dtype = open_family(resolve_path(config.model.path)), DTYPES[config.model.dtype]
    transformer, length = on_meta(family, "transformer"), config.prompts.max_sequence_length
    blank = family.blank(transformer, length, dtype, "meta")
    return sum(tensor.nbytes for tensor in blank.tensors.values())


def stacked(prompts: Sequence[Conditioning]) -> dict[str, Tensor]:
    """A shard's tensors ``[n, ...]``; texts of several lengths end in zeros, see ``LENGTH``."""
    shard = {}
    for name in prompts[0].tensors:
        tensors = [prompt[name] for prompt in prompts]
        shard[name] = pad_sequence(tensors, batch_first=True)
        if len({tensor.shape for tensor in tensors}) > 1:
            shard[name + LENGTH] = torch.tensor([len(tensor) for tensor in tensors])
    return shard


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a folder, written whole or not at all."""
    content = {"format": FORMAT} | asdict(manifest)
    replace_text(folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False))


class Embeddings:
    """A checked folder of embeddings, for reading prompts by their text."""

    def __init__(self, folder: Path) -> None:
        """Raises PromptFileError: no readable manifest, a file is missing or of another size."""
        self.folder = folder
        self.manifest = _read_manifest(folder / MANIFEST)
        for shard in self.manifest.files:
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                found = "missing" if size is None else f"{size} bytes instead of {shard.bytes}"
                raise PromptFileError(f"{path}: damaged shard: {found}; {_AGAIN}")
        table = folder / PROMPTS_FILE
        if not table.is_file() or sha256_of_file(table) != self.manifest.prompts_sha256:
            raise PromptFileError(
                f"{table}: missing or damaged (SHA-256 differs from {MANIFEST}); {_AGAIN}"
            )
        if self.manifest.negative_prompt is not None:
            # Read before any actor starts: every prompt needs it.
            _ = self.negative
        self._places = {
            row["text"]: (row["shard"], row["row"], row["checksum"])
            for row in pq.read_table(table).to_pylist()
        }

    def check_encoder(self, config: Config) -> None:
        """Refuse embeddings that the configuration's own encoders would not make.

        Raises:
            PromptFileError: another family, negative prompt, or other encoders, precision or
                length; which, and what to do.
        """
        family = open_family(resolve_path(config.model.path))
        if self.manifest.pipeline not in (None, family.pipeline):
            raise PromptFileError(
                f"{self.folder / MANIFEST}: embeddings made for a {self.manifest.pipeline}, and "
                f"model.path {config.model.path!r} is a {family.pipeline}. Embed the prompts "
                "again: g2rpo embed"
            )
        negative, made_for = negative_prompt(config), self.manifest.negative_prompt
        if negative is not None and negative != made_for:
            there = "no negative prompt" if made_for is None else f"negative prompt {made_for!r}"
            raise PromptFileError(
                f"{self.folder / MANIFEST}: embeddings with {there}, and sampling.negative_prompt "
                f"is {negative!r}. Embed the prompts again: g2rpo embed; or set "
                "sampling.negative_prompt to what they were made with"
            )
        wanted = encoder_fingerprint(config.model) | {
            "dtype (model.dtype)": config.model.dtype,
            "prompts.max_sequence_length": str(config.prompts.max_sequence_length),
        }
        made = self.manifest.encoder | {
            "dtype (model.dtype)": self.manifest.dtype,
            "prompts.max_sequence_length": str(self.manifest.max_sequence_length),
        }
        differing = [
            f"{key} is {made.get(key)} there and {value} in the configuration"
            for key, value in wanted.items()
            if made.get(key) != value and not self._is_of_same_files(config.model, key)
        ]
        if differing:
            raise PromptFileError(
                f"{self.folder / MANIFEST}: embeddings of another encoder than model.path "
                f"{config.model.path!r} has: {'; '.join(differing)}. Embed the prompts again: "
                "g2rpo embed"
            )

    def _is_of_same_files(self, model: ModelSection, part: str) -> bool:
        """As embeddings say that were written before fingerprints were of tensors."""
        folder = resolve_path(model.path) / part
        return folder.is_dir() and self.manifest.encoder.get(part) == folder_fingerprint(folder)

    def __contains__(self, text: str) -> bool:
        return text in self._places

    def embeds(self, text: str) -> Conditioning:
        """Embeddings of one prompt, compared with their checksum.

        Raises:
            PromptFileError: the shard is damaged where the prompt lies.
        """
        shard, row, checksum = self._places[text]
        path = self.folder / self.manifest.files[shard].file
        try:
            with safe_open(path, framework="pt") as file:
                row_of = {name: file.get_slice(name)[row] for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, IndexError) as error:
            raise PromptFileError(
                f"{path}: damaged shard: {cause_of(error, path)}; {_AGAIN}"
            ) from error
        embeds = Conditioning(
            {
                name: tensor[: row_of.get(name + LENGTH)]
                for name, tensor in row_of.items()
                if not name.endswith(LENGTH)
            }
        )
        if prompt_checksum(embeds) != checksum:
            raise PromptFileError(
                f"{path}, row {row}: damaged shard: the checksum of prompt {text!r:.60} differs; "
                f"{_AGAIN}"
            )
        return embeds

    @cached_property
    def negative(self) -> Conditioning:
        """Of the manifest's negative prompt, compared with its checksum.

        Raises:
            PromptFileError: the file is missing or damaged.
        """
        path = self.folder / NEGATIVE_FILE
        try:
            negative = Conditioning(load_file(path))
        except (OSError, SafetensorError) as error:
            raise PromptFileError(
                f"{path}: missing or damaged: {cause_of(error, path)}; {_AGAIN}"
            ) from error
        if prompt_checksum(negative) != self.manifest.negative_checksum:
            raise PromptFileError(f"{path}: damaged: its checksum differs; {_AGAIN}")
        return negative


_AGAIN = "remove the folder and run g2rpo embed again"


def _read_manifest(path: Path) -> Manifest:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT!r}")
        files = [ShardFile(**entry) for entry in content.pop("files")]
        return Manifest(files=files, **content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PromptFileError(
            f"{path}: not readable as a manifest: {cause_of(error, path)}"
        ) from error
