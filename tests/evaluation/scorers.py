"""A scorer of brightness that fails where a prompt tells it to."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer


class Brightness(RewardScorer):
    """0 to 1."""

    class Options(Section):
        """Settings of the scorer."""

        log: str | None = None
        """File that gets a line with the number of pictures for each call."""
        sleep_s: float = 0.0
        """What a call takes."""
        broken: bool = False
        """Whether it always fails."""
        wants: str | None = None
        """Metadata without which it fails."""

    kind = "brightness"

    def __init__(self, options: Section, device: str) -> None:  # noqa: ARG002
        assert isinstance(options, self.Options)
        self._options = options

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        if self._options.log:
            with Path(self._options.log).open("a") as log:
                print(len(pictures), file=log)
        time.sleep(self._options.sleep_s)
        if self._options.broken or any(prompt.startswith("raise") for prompt in prompts):
            raise ZeroDivisionError("the scorer's own bug")
        wanted = self._options.wants
        if any(wanted not in metadata_of(prompt) for prompt in prompts if wanted):
            raise KeyError(f"no {wanted} in the prompt file")
        scores = pictures.float().mean(dim=(1, 2, 3)) / 255
        silent = [prompt.startswith("nothing") for prompt in prompts]
        return scores.masked_fill(torch.tensor(silent), torch.nan)


class Group(Brightness):
    """How many pictures came in the request."""

    compares_pictures = True

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return super().score(pictures, prompts) * 0 + len(pictures)


class Plain(Brightness):
    """Judges pictures alone."""

    reads_prompts = False
