"""Prompts of a run, and which of them an iteration trains on."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.maths.noise import seed_of
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import negative_prompt
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.prompts.embeddings import Embeddings
from g2rpo_ray.prompts.formats import PromptFileError
from g2rpo_ray.prompts.reading import MANIFEST, read_prompts

T = TypeVar("T")
logger = logging.getLogger(__name__)

BESIDE = ".embeddings"
"""Ends the name of a folder of embeddings beside a prompt file of the same name."""


@dataclass(frozen=True)
class Prompt:
    """One text with its embeddings, as a rollout task carries it."""

    prompt_id: int
    """Place in the prompt file's list, from 0."""
    text: str
    embeds: Conditioning


def read_config_prompts(config: Config, path: str) -> list[str]:
    """Prompts of ``prompts.train`` or ``prompts.heldout``.

    Raises:
        PromptFileError: the file cannot be used, or is a folder of another encoder's embeddings.
    """
    if embeddings := open_embeddings(path):
        embeddings.check_encoder(config)
    prompts = config.prompts
    return read_prompts(resolve_path(path), prompts.max_characters, prompts.key)


def check_apart(train: Sequence[str], heldout: Sequence[str]) -> None:
    """No held-out prompt is trained on: else a gain there is no sign of progress.

    Raises:
        PromptFileError: some are; says how many, and one of them.
    """
    shared = set(train) & set(heldout)
    if shared:
        raise PromptFileError(
            f"prompts.train and prompts.heldout share {len(shared)} prompts, such as "
            f"{min(shared)!r:.200}; scores on prompts that were trained on show no progress: take "
            "them out of one of the two"
        )


def repeated_words(config: Config, count: int) -> str:
    """That ``count`` prompts to train on are fewer than an iteration takes; empty where not."""
    wanted = config.sampling.prompts_per_iteration
    if count >= wanted:
        return ""
    return (
        f"prompts.train has {count} prompts, and an iteration takes {wanted} "
        "(sampling.prompts_per_iteration): the same come several times in each"
    )


def open_embeddings(path: str) -> Embeddings | None:
    """The folder of embeddings that a setting names; None where it names something else."""
    folder = resolve_path(path)
    return Embeddings(folder) if (folder / MANIFEST).is_file() else None


def embeddings_of(config: Config, path: str) -> Embeddings | None:
    """Embeddings of the prompts that a setting names: its folder, or what lies beside its file
    (``train.embeddings`` beside ``train.txt``) and is of this configuration's encoders."""
    if named := open_embeddings(path):
        return named
    file = resolve_path(path)
    beside = open_embeddings(str(file.parent / f"{file.stem}{BESIDE}"))
    try:
        if beside is not None:
            beside.check_encoder(config)
    except (PromptFileError, ModelFolderError) as error:
        logger.info("not taken: %s", error)
        return None
    return beside


class EmbeddedPrompts:
    """Embeddings of a run's prompts that lie on the disk: what ``g2rpo embed`` wrote."""

    def __init__(self, config: Config) -> None:
        files = (config.prompts.train, config.prompts.heldout)
        found = [embeddings_of(config, path) for path in files]
        self._folders = [embeddings for embeddings in found if embeddings]
        self._negative = negative_prompt(config)
        self.train, self.heldout = (embeddings is not None for embeddings in found)
        """Whether there are any of them."""
        self.bytes = sum(file.bytes for it in self._folders for file in it.manifest.files)

    def __contains__(self, text: str) -> bool:
        return any(text in embeddings for embeddings in self._folders)

    def get(self, text: str) -> Conditioning | None:
        """Raises PromptFileError: the shard is damaged where it lies."""
        for embeddings in self._folders:
            if text in embeddings:
                negative = None if self._negative is None else embeddings.negative
                return replace(embeddings.embeds(text), negative=negative)
        return None


def cut_words(tokens: Sequence[int], texts: int, length: int) -> str:
    """Of ``TextEncoder.cut``, for people; empty where nothing was cut.

    Args:
        texts: how many there are, with those that fit.
        length: ``prompts.max_sequence_length``.
    """
    if not tokens:
        return ""
    some = "the prompt is" if texts == 1 else f"{len(tokens)} of {texts} prompts are"
    return (
        f"{some} cut: {'' if texts == 1 else 'up to '}{max(tokens)} tokens, and "
        f"prompts.max_sequence_length is {length}: raise it, where the model was trained on "
        "longer texts, or shorten the text"
    )


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Up to ``count`` items, evenly spaced: prompt files are often sorted by subject."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


@dataclass(frozen=True)
class PromptOrder:
    """Which prompts each iteration sees: shuffled epochs, a function of seed and iteration alone.

    There is no state to save: a resumed run continues at its iteration, across epoch borders too.
    """

    count: int
    """Prompts in the file."""
    seed: int
    prompts_per_iteration: int

    def batch(self, iteration: int) -> list[int]:
        """Prompt ids of one iteration, by slot."""
        first = iteration * self.prompts_per_iteration
        return [self._at(first + slot) for slot in range(self.prompts_per_iteration)]

    def _at(self, position: int) -> int:
        epoch, index = divmod(position, self.count)
        generator = torch.Generator().manual_seed(seed_of(self.seed, "prompt order", epoch))
        return int(torch.randperm(self.count, generator=generator)[index])
