"""Drawing pictures with trained or published weights, in this process, without Ray."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from g2rpo_ray.common.device import describe_device, role_device
from g2rpo_ray.common.files import make_writable, replacing
from g2rpo_ray.config import Config
from g2rpo_ray.maths import noise
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import negative_prompt
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.loading import DTYPES, check_model, load_part
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.prompts.dataset import cut_words
from g2rpo_ray.run.weights import SampleError, Source, load_source
from g2rpo_ray.sampling.engine import schedule_of
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.sampler import Sampler
from g2rpo_ray.training.settings import at_deployment_size, size_words


@dataclass(frozen=True)
class SampleOptions:
    """What is drawn, with which weights."""

    prompts: Sequence[str]
    pictures_per_prompt: int = 1
    seed: int = 0
    """Of the initial noise."""
    checkpoint: str = "last"
    """``last``, ``best``, ``base``, the folder of a checkpoint, an adapter (see ``load_adapter``),
    or a transformer's weights in diffusers' format, as ``g2rpo export`` writes them and G2RPO's
    were published: a file, or the folder of either."""
    trained_steps: int | None = None
    """Hybrid inference (arXiv 2507.21802): the trained weights for so many steps, the base model's
    for the rest; None means trained weights for all."""
    average: bool = False
    """Of a checkpoint, the moving average of the weights (``learner.ema_decay``)."""


def sample(config: Config, options: SampleOptions, folder: Path) -> list[Path]:
    """Draw by ODE as an evaluation does, with its size and steps, and save PNG files, where the
    run's workers draw.

    That is on a card, or with ``rollout.gpus_per_worker`` 0 on the CPU.

    Returns:
        Paths, ``<prompt number>_<picture number>.png``, in the order of prompts.

    Raises:
        SampleError: a prompt is a file's name, ``trained_steps`` is not among the steps,
            ``folder`` cannot be written, or latents are not finite.
        DiskError: the disk of ``folder`` is full or read-only.
        DeviceError: a card is asked for, and there is none.
        ModelFolderError, CheckpointError, RunFolderError, WeightMismatchError: the weights cannot
            be used.
    """
    for prompt in options.prompts:
        if os.path.isfile(prompt):  # noqa: PTH113 - Path.is_file raises where a text is long
            raise SampleError(f"--prompt {prompt}: it takes the text itself, and this is a file")
    switch = _switch(config, options)
    check_model(config)
    config = at_deployment_size(config)
    make_writable(folder, SampleError, "--out")
    gpus, setting = config.rollout.gpus_per_worker, "rollout.gpus_per_worker"
    device = role_device(gpus, setting)
    # Beside the paths, which scripts read.
    where, size = describe_device(gpus, setting), size_words(config)
    print(f"drawing {size} on: {where}", file=sys.stderr, flush=True)
    source = load_source(config, options.checkpoint, options.average)
    source.policy.to(device)
    encoder = text_encoder(config, device)
    length = config.prompts.max_sequence_length
    if told := cut_words(encoder.cut(options.prompts), len(options.prompts), length):
        print(told, file=sys.stderr, flush=True)
    embeds = [encoder.encode(prompt).to(device) for prompt in options.prompts]
    del encoder  # its memory, which may be half of the card's
    shape = source.policy.shape
    start = start_noise(shape, options.seed, options.pictures_per_prompt).to(device)
    latents = walk(config, source, start, embeds, switch)
    for prompt, x0 in zip(options.prompts, latents, strict=True):
        check_finite(x0, prompt, f"--checkpoint {options.checkpoint}")
    return _save(picture_decoder(config, source.policy, device), latents, folder)


def _switch(config: Config, options: SampleOptions) -> int:
    """Schedule index at which the base model takes over."""
    steps = config.evaluation.steps
    trained_steps = steps if options.trained_steps is None else options.trained_steps
    if not 0 <= trained_steps <= steps:
        raise SampleError(
            f"--trained-steps {trained_steps}: evaluation.steps is {steps}; allowed: 0 to {steps}"
        )
    return trained_steps


def text_encoder(config: Config, device: torch.device) -> TextEncoder:
    length, negative = config.prompts.max_sequence_length, negative_prompt(config)
    return TextEncoder(config.model, length, str(device), negative)


def start_noise(shape: LatentShape, seed: int, pictures: int) -> Tensor:
    """float32 ``[J, tokens, channels]``, the same for every prompt."""
    numbers = range(pictures)
    return torch.stack([noise.normal(shape.packed, "sample", seed, n) for n in numbers])


def walk(
    config: Config, source: Source, start: Tensor, embeds: Sequence[Conditioning], switch: int
) -> list[Tensor]:
    """Latents x_0 of each prompt, shaped as ``start``, by ODE with ``evaluation.steps``; the base
    model takes over at the schedule's index ``switch``."""
    steps = config.evaluation.steps
    evaluate = Evaluator(source.policy, config.rollout.planned_batch_size)
    sampler = Sampler(evaluate, schedule_of(config.sampling, steps, source.policy))
    latents = [start] * len(embeds)
    if switch > 0:
        latents = [sampler.trajectory(start, e, 0, switch).x0 for e in embeds]
    if switch < steps:
        source.back_to_base()
        pairs = zip(latents, embeds, strict=True)
        latents = [sampler.trajectory(x, e, switch, steps).x0 for x, e in pairs]
    return latents


def check_finite(x0: Tensor, prompt: str, weights: str) -> None:
    """Raises SampleError: the decoder would make a black picture of latents that are not finite."""
    broken = int((~x0.isfinite().flatten(1).all(dim=1)).sum())
    if broken:
        raise SampleError(
            f"{weights}: {broken} of {len(x0)} pictures have latents that are not finite, prompt "
            f"{prompt!r:.80}; nothing is saved. Draw from an earlier checkpoint, or with "
            "model.dtype: float32"
        )


def picture_decoder(config: Config, policy: Policy, device: torch.device) -> PictureDecoder:
    vae = load_part(config.model, "vae", DTYPES[config.model.dtype]).to(device)
    largest_px = max(config.sampling.height, config.sampling.width)
    return PictureDecoder(
        policy.family,
        vae,
        policy.shape,
        config.rollout.decode_batch_size,
        tiled=largest_px > config.rollout.decode_tile_above_px,
    )


def _save(decoder: PictureDecoder, latents: Sequence[Tensor], folder: Path) -> list[Path]:
    paths = []
    for prompt_number, x0 in enumerate(latents):
        for number, picture in enumerate(decoder.decode(x0)):
            paths.append(folder / f"{prompt_number}_{number}.png")
            with replacing(paths[-1]) as temporary:
                Image.fromarray(picture.numpy()).save(temporary, "PNG")
    return paths
