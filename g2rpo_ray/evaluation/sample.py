"""Drawing pictures with trained or published weights, in this process, without Ray."""

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import torch
from PIL import Image
from torch import Tensor

from g2rpo_ray.common.device import describe_device, role_device
from g2rpo_ray.common.files import check_room, replacing, sole_writer, writing
from g2rpo_ray.common.formatting import format_seconds, format_size
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.prompt_text import is_blank
from g2rpo_ray.config import Config
from g2rpo_ray.maths import noise
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.families import latents_of, negative_prompt, open_family
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.loading import DTYPES, check_model, load_part
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.prompts.dataset import cut_words
from g2rpo_ray.run.paths import check_outside_states
from g2rpo_ray.run.weights import SampleError, Source, load_source
from g2rpo_ray.sampling.engine import schedule_of
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.sampler import Sampler
from g2rpo_ray.training.settings import at_deployment_size, png_files, size_words

LINE_S = 5.0
"""Between two lines about the progress."""
PICTURE_FILE = "{}_{}.png"
"""Numbers of the prompt, and of the picture among its own."""


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


def sample(config: Config, options: SampleOptions, folder: Path) -> Iterator[Path]:
    """Draw by ODE as an evaluation does, with its size and steps, and save PNG files, where the
    run's workers draw; ``rollout.batch_size`` pictures of a prompt at a time.

    That is on a card, or with ``rollout.gpus_per_worker`` 0 on the CPU.

    Yields:
        Paths, ``<prompt number>_<picture number>.png``, in the order of prompts, as they are saved.

    Raises:
        SampleError: a prompt is empty or a file's name, ``trained_steps`` is not among the steps,
            ``folder`` cannot be written or lies among checkpoints, or latents are not finite.
        DiskError: the disk of ``folder`` is too small, full or read-only.
        DeviceError: a card is asked for, and there is none.
        ModelFolderError, CheckpointError, RunFolderError, WeightMismatchError: the weights cannot
            be used.
    """
    for prompt in options.prompts:
        if is_blank(prompt):
            raise SampleError(
                f"--prompt {prompt!r}: the prompt is empty: write what the picture shall show"
            )
        if os.path.isfile(prompt):  # noqa: PTH113 - Path.is_file raises where a text is long
            raise SampleError(f"--prompt {prompt}: it takes the text itself, and this is a file")
    switch = _switch(config, options)
    check_outside_states(folder, SampleError, "--out")
    check_model(config)
    config = at_deployment_size(config)
    pictures = len(options.prompts) * options.pictures_per_prompt
    # os.path.isfile, as Path.is_file raises where the folder's name is too long.
    there = sum(
        os.path.isfile(folder / PICTURE_FILE.format(prompt, number))  # noqa: PTH113
        for prompt in range(len(options.prompts))
        for number in range(options.pictures_per_prompt)
    )
    files = png_files(config, pictures - there)
    is_hybrid = 0 < switch < config.evaluation.steps
    waiting_bytes = pictures * _latents_bytes(config) if is_hybrid else 0
    latents = ", with the latents at the switch," * is_hybrid
    what = f"{files.words}{latents} (fewer with --count)"
    check_room(folder, files.size_bytes + waiting_bytes, what)
    with sole_writer(folder, SampleError, "--out"):
        gpus, setting = config.rollout.gpus_per_worker, "rollout.gpus_per_worker"
        device = role_device(gpus, setting)
        # Beside the paths, which scripts read.
        where, size = describe_device(gpus, setting), size_words(config)
        most = f"pictures: {pictures}, up to {format_size(png_files(config, pictures).size_bytes)}"
        print(f"drawing {size} on: {where}; {most}", file=sys.stderr, flush=True)
        source = load_source(config, options.checkpoint, options.average)
        source.policy.to(device)
        encoder = text_encoder(config, device)
        length = config.prompts.max_sequence_length
        if told := cut_words(encoder.cut(options.prompts), len(options.prompts), length):
            print(told, file=sys.stderr, flush=True)
        embeds = [encoder.encode(prompt).to(device) for prompt in options.prompts]
        del encoder  # its memory, which may be half of the card's
        yield from _draw(config, options, source, embeds, switch, folder)


def _draw(
    config: Config,
    options: SampleOptions,
    source: Source,
    embeds: Sequence[Conditioning],
    switch: int,
    folder: Path,
) -> Iterator[Path]:
    """Pictures, a part at a time; at the schedule's index ``switch`` the base model takes over."""
    steps, shape, device = config.evaluation.steps, source.policy.shape, embeds[0].device
    sampler = make_sampler(config, source.policy, steps)
    decoder = picture_decoder(config, source.policy, device)
    progress = _Progress(len(embeds) * options.pictures_per_prompt, steps, sampler.exact)

    def parts() -> Iterator[tuple[int, range]]:
        numbers, size = range(options.pictures_per_prompt), config.rollout.planned_batch_size
        for prompt in range(len(embeds)):
            for first in range(0, len(numbers), size):
                yield prompt, numbers[first : first + size]

    # Weights change once, not with every part: latents wait on the disk for it.
    with writing(folder), TemporaryFile(dir=folder) as waiting:
        is_hybrid = 0 < switch < steps
        for prompt, numbers in parts() if is_hybrid else ():
            x = start_noise(shape, options.seed, numbers).to(device)
            x = sampler.arrive(x, embeds[prompt], 0, switch)
            waiting.write(x.cpu().numpy().tobytes())
            progress.tell(0)
        waiting.seek(0)
        if switch < steps:
            source.back_to_base()
        saved = 0
        for prompt, numbers in parts():
            x = start_noise(shape, options.seed, numbers)
            if is_hybrid:
                content = bytearray(waiting.read(x.nbytes))
                x = torch.frombuffer(content, dtype=x.dtype).view_as(x)
            x0 = sampler.arrive(x.to(device), embeds[prompt], switch if is_hybrid else 0)
            check_finite(x0, options.prompts[prompt], f"--checkpoint {options.checkpoint}")
            for number, picture in zip(numbers, decoder.decode(x0), strict=True):
                path = folder / PICTURE_FILE.format(prompt, number)
                with replacing(path) as temporary:
                    Image.fromarray(picture.numpy()).save(temporary, "PNG")
                yield path
            saved += len(numbers)
            progress.tell(saved)


class _Progress:
    """Says after the first part, and then every ``LINE_S``, how long the rest will take."""

    def __init__(self, pictures: int, steps: int, evaluate: Evaluator) -> None:
        self._pictures, self._total, self._evaluate = pictures, pictures * steps, evaluate
        self._started_s, self._told_s = time.monotonic(), -math.inf

    def tell(self, saved: int) -> None:
        now_s, done = time.monotonic(), self._evaluate.evaluations
        if saved == self._pictures or now_s - self._told_s < LINE_S:
            return
        self._told_s = now_s
        left = format_seconds((now_s - self._started_s) * (self._total - done) / done)
        print(f"{saved} of {self._pictures} pictures, {left} left", file=sys.stderr, flush=True)


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


def _latents_bytes(config: Config) -> int:
    """Of one picture, float32."""
    shape = latents_of(config, open_family(resolve_path(config.model.path)))
    return 4 * math.prod(shape.packed)


def start_noise(shape: LatentShape, seed: int, numbers: range) -> Tensor:
    """float32 ``[J, tokens, channels]`` of J pictures of a prompt, the same for every prompt."""
    return torch.stack([noise.normal(shape.packed, "sample", seed, n) for n in numbers])


def make_sampler(config: Config, policy: Policy, steps: int) -> Sampler:
    """Draws as an evaluation with so many steps."""
    evaluate = Evaluator(policy, config.rollout.planned_batch_size)
    return Sampler(evaluate, schedule_of(config.sampling, steps, policy))


def check_finite(x0: Tensor, prompt: str, weights: str) -> None:
    """Raises SampleError: the decoder would make a black picture of latents that are not finite."""
    broken = int((~x0.isfinite().flatten(1).all(dim=1)).sum())
    if broken:
        raise SampleError(
            f"{weights}: {broken} of {len(x0)} pictures have latents that are not finite, prompt "
            f"{prompt!r:.80}; none of these is saved. Draw from an earlier checkpoint, or with "
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
