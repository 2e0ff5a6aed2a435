"""What the demo draws and scores, without its page: a run's weights beside the base model's."""

import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from g2rpo_ray.common.device import role_device
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.prompt_text import is_blank
from g2rpo_ray.config import Config
from g2rpo_ray.evaluation.sample import (
    check_finite,
    make_sampler,
    picture_decoder,
    start_noise,
    text_encoder,
)
from g2rpo_ray.evaluation.scoring.judges import LocalJudge, Score
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder, iteration_of, list_checkpoints
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.models.catalogue import check_rewards
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.loading import check_model
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.weights import load_weights, trainable_parameters
from g2rpo_ray.prompts.dataset import cut_words
from g2rpo_ray.run.paths import run_folder
from g2rpo_ray.run.weights import read_fitting_info, weights_in, while_it_is_there
from g2rpo_ray.training.settings import at_deployment_size

MOST_STEPS = 100


class DemoError(InputError):
    """What was asked for on the page cannot be drawn; the message says what is allowed."""


@dataclass(frozen=True)
class Asked:
    """One press of the button."""

    prompt: str
    seed: int
    """Of the initial noise, which both pictures start from."""
    steps: int
    trained_steps: int
    """Hybrid: so many steps by the trained weights, the rest by the base model."""
    checkpoint: str
    """``last``, ``best``, or the name of a checkpoint's folder."""


@dataclass(frozen=True)
class Drawn:
    """One picture."""

    label: str
    picture: np.ndarray
    """uint8 ``[H, W, 3]``."""
    scores: dict[str, Score]
    note: str = ""
    """What is to be said of it, if anything."""


def read_asked(
    config: Config, prompt: Any, seed: Any, steps: Any, share: Any, checkpoint: Any
) -> Asked:
    """What a browser sent, checked; ``share`` of the steps is made by the trained weights.

    Raises:
        DemoError: something is missing, too long or out of range.
    """
    text, longest = str(prompt or "").strip(), config.prompts.max_characters
    if is_blank(text):
        raise DemoError("The prompt is empty: write what the picture shall show.")
    if len(text) > longest:
        raise DemoError(
            f"The prompt has {len(text):,} characters; allowed are {longest:,} "
            "(prompts.max_characters of the run)."
        )
    if "\0" in text or re.search("[\ud800-\udfff]", text):
        raise DemoError("The prompt holds a character that is no text (NUL, or half a character).")
    if not (isinstance(seed, int | float) and _is_whole(seed)):
        raise DemoError(f"Seed: {seed!r:.40} is no whole number.")
    if not (isinstance(steps, int | float) and _is_whole(steps) and 1 <= steps <= MOST_STEPS):
        raise DemoError(f"Steps: {steps!r:.40}; allowed are 1 to {MOST_STEPS}.")
    if not (isinstance(share, int | float) and 0 <= share <= 1):
        raise DemoError(f"Hybrid share: {share!r:.40}; allowed are 0 to 1.")
    name = str(checkpoint)
    if name not in ("last", "best") and not re.fullmatch(r"iteration_\d{6}", name):
        known = ", ".join(checkpoints(config))
        raise DemoError(f"Checkpoint: {name!r:.40}; choose one of {known}.")
    return Asked(text, int(seed), int(steps), round(share * int(steps)), name)


def _is_whole(value: float) -> bool:
    return math.isfinite(value) and value == int(value)


def checkpoints(config: Config) -> list[str]:
    """Names to choose from; a run that trains makes new ones and deletes old ones."""
    best = [] if config.checkpoint.best is None else ["best"]
    return ["last", *best, *(path.name for path in reversed(list_checkpoints(run_folder(config))))]


class Encoded(NamedTuple):
    """The last prompt, which the second picture of a pair has, too."""

    prompt: str
    embeds: Conditioning
    """On the CPU."""
    note: str
    """That it was cut, if it was."""


class Studio:
    """Encoders, one network, decoder and scorers, loaded once; one picture is drawn at a time."""

    def __init__(self, config: Config) -> None:
        """
        Raises:
            DeviceError: a card is asked for, and there is none.
            ModelFolderError, ScorerError: model or a scorer cannot be loaded.
        """
        check_model(config)
        check_rewards(config)
        self.config = config = at_deployment_size(config)
        self._device = role_device(config.rollout.gpus_per_worker, "rollout.gpus_per_worker")
        encoder_device = role_device(config.prompts.encoder_gpus, "prompts.encoder_gpus")
        self._encoder = text_encoder(config, encoder_device)
        self._policy = load_policy(config)
        # Fresh adapters change nothing: with them, too, this is the base model.
        parameters = trainable_parameters(self._policy)
        self._base = {name: p.detach().cpu().clone() for name, p in parameters.items()}
        self._policy.to(self._device)
        self._decoder = picture_decoder(config, self._policy, self._device)
        self._judge = LocalJudge(config.rewards)
        self._trained: tuple[CheckpointInfo, dict[str, Tensor]] | None = None
        self._encoded = self._encode("")
        self._lock = threading.Lock()

    def draw(self, asked: Asked, trained: bool, on_step: Callable[[int], None]) -> Drawn:
        """One of the two pictures, with its scores.

        Args:
            trained: with the run's weights; else the base model's.
            on_step: told how many steps are done; what it raises ends the drawing.

        Raises:
            CheckpointError, RunFolderError: there is no such checkpoint (any more), or it does not
                fit.
            SampleError: the latents are not finite.
            DeviceMemoryError: memory ended.
        """
        with self._lock:
            weights, label, switch = self._base, "base model", asked.steps
            if trained:
                info, weights = self._weights(asked.checkpoint)
                switch, label = asked.trained_steps, f"iteration {info.iteration}"
                label += f", {switch} of {asked.steps} steps" if switch < asked.steps else ""
            load_weights(self._policy, weights)
            x0 = self._walk(asked, switch, on_step)
            check_finite(x0, asked.prompt, label)
            picture = self._decoder.decode(x0)
            answers = self._judge.scores(
                {name: [(picture, asked.prompt)] for name in self.config.rewards}
            )
            scores = {name: found[0] for name, found in answers.items()}
            return Drawn(label, picture[0].numpy(), scores, self._encoded.note)

    def _weights(self, name: str) -> tuple[CheckpointInfo, dict[str, Tensor]]:
        """Of a checkpoint; those of the last one that was asked for are kept in memory."""
        folder = run_folder(self.config)
        if name not in ("last", "best"):
            name = str(checkpoint_folder(folder, iteration_of(folder / name)))
        kept = self._trained

        def read(path: Path) -> tuple[CheckpointInfo, dict[str, Tensor]]:
            info = read_fitting_info(path, self.config.model)
            if kept is not None and kept[0] == info:
                return kept
            return info, weights_in(self.config, path)

        _, found = while_it_is_there(self.config, name, read)
        self._trained = found
        return found

    def _encode(self, prompt: str) -> Encoded:
        length = self.config.prompts.max_sequence_length
        note = cut_words(self._encoder.cut([prompt]), 1, length)
        return Encoded(prompt, self._encoder.encode(prompt), note)

    def _walk(self, asked: Asked, switch: int, on_step: Callable[[int], None]) -> Tensor:
        if self._encoded.prompt != asked.prompt:
            self._encoded = self._encode(asked.prompt)
        embeds = self._encoded.embeds.to(self._device)
        x = start_noise(self._policy.shape, asked.seed, range(1)).to(self._device)
        sampler = make_sampler(self.config, self._policy, asked.steps)
        done = 0

        def step(*_: object) -> None:
            nonlocal done
            done += 1
            on_step(done)

        hook = self._policy.register_forward_hook(step)
        try:
            x = sampler.arrive(x, embeds, 0, switch)
            if switch < asked.steps:
                load_weights(self._policy, self._base)
            return sampler.arrive(x, embeds, switch)
        finally:
            hook.remove()
