"""Prompt files, and which prompts an iteration trains on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from g2rpo_ray.algorithm.noise import seed_of
from g2rpo_ray.config import Config, resolve_path
from g2rpo_ray.errors import InputError
from g2rpo_ray.models.embeds import PromptEmbeds

T = TypeVar("T")


class PromptFileError(InputError):
    """A prompt file cannot be used; the message names file, line and cause."""


@dataclass(frozen=True)
class Prompt:
    """One text with its embeddings, as a rollout task carries it."""

    prompt_id: int
    """Place in the prompt file's list, from 0."""
    text: str
    embeds: PromptEmbeds


def read_prompts(path: Path, max_characters: int) -> list[str]:
    """Read a UTF-8 text file with one prompt a line; any script is welcome.

    Returns:
        Prompts without surrounding white space, in the order of the file; a prompt's id is its
        place in this list. Empty lines are passed over.

    Raises:
        PromptFileError: the file is missing, holds no prompt, is not UTF-8, has a NUL character or
            a line longer than ``max_characters``.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise PromptFileError(f"{path}: no such prompt file") from None
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").strip().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise PromptFileError(
                f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}); convert "
                "the file to UTF-8"
            ) from None
        if "\0" in text:
            raise PromptFileError(f"{path}, line {number}: holds a NUL character")
        if len(text) > max_characters:
            raise PromptFileError(
                f"{path}, line {number}: {len(text)} characters; allowed are {max_characters} "
                "(prompts.max_characters)"
            )
        if text:
            prompts.append(text)
    if not prompts:
        raise PromptFileError(f"{path}: no prompt in it; expected one prompt a line")
    return prompts


def read_config_prompts(config: Config, path: str) -> list[str]:
    """Prompts of ``prompts.train`` or ``prompts.heldout``."""
    return read_prompts(resolve_path(path), config.prompts.max_characters)


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
