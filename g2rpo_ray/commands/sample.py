"""Drawing pictures with trained or published weights, in this process, without Ray."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import torch
from PIL import Image
from torch import Tensor

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.files import read_weights
from g2rpo_ray.maths import noise
from g2rpo_ray.models.loading import DTYPES, check_model, load_part
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.saving import ADAPTER_FILE, load_adapter, load_transformer_weights
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.models.weights import load_weights
from g2rpo_ray.run.folder import checkpoint_named, read_fitting_info
from g2rpo_ray.sampling.engine import schedule_of
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.sampler import Sampler


class SampleError(InputError):
    """Pictures cannot be drawn as asked; the message says why."""


def sample(
    config: Config,
    *,
    checkpoint: str,
    prompts: Sequence[str],
    pictures_per_prompt: int,
    seed: int,
    folder: Path,
    trained_steps: int | None = None,
    average: bool = False,
) -> list[Path]:
    """Draw by ODE with ``evaluation.steps`` and save PNG files.

    Args:
        checkpoint: ``last``, ``best``, ``base``, the folder of a checkpoint, an exported adapter
            (``pytorch_lora_weights.safetensors`` or its folder), or a transformer's weights in
            diffusers' format, as ``g2rpo export`` writes them and G2RPO's were published (a
            folder with ``diffusion_pytorch_model*.safetensors``, or one such file).
        trained_steps: hybrid inference (arXiv 2507.21802): trained weights for so many steps, the
            base model's for the rest; none means trained weights for all.
        average: of a checkpoint, the moving average of the weights (``learner.ema_decay``).

    Returns:
        Paths, ``<prompt number>_<picture number>.png``, in the order of prompts.

    Raises:
        SampleError: ``trained_steps`` is not among the steps, ``folder`` cannot be written, or
            latents are not finite.
        ModelFolderError, CheckpointError, RunFolderError, WeightMismatchError: the weights cannot
            be used.
    """
    steps = config.evaluation.steps
    trained_steps = steps if trained_steps is None else trained_steps
    if not 0 <= trained_steps <= steps:
        raise SampleError(
            f"--trained-steps {trained_steps}: evaluation.steps is {steps}; allowed: 0 to {steps}"
        )
    check_model(config)
    _make_writable(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = load_source(config, checkpoint, average)
    policy = source.policy.to(device)
    encoder = TextEncoder(config.model, config.prompts.max_sequence_length, str(device))
    sigmas = schedule_of(config.sampling, steps, policy)
    evaluate = Evaluator(policy, config.rollout.planned_batch_size)
    embeds = [encoder.encode(prompt).to(device) for prompt in prompts]
    latents = [
        torch.stack(
            [
                noise.normal(policy.shape.packed, "sample", seed, number)
                for number in range(pictures_per_prompt)
            ]
        ).to(device)
        for _ in prompts
    ]
    if trained_steps > 0:
        sampler = Sampler(evaluate, sigmas[: trained_steps + 1])
        latents = [sampler.trajectory(x, e).x0 for x, e in zip(latents, embeds, strict=True)]
    if trained_steps < steps:
        source.back_to_base()
        sampler = Sampler(evaluate, sigmas[trained_steps:])
        latents = [sampler.trajectory(x, e).x0 for x, e in zip(latents, embeds, strict=True)]
    _check_finite(latents, prompts, checkpoint)

    vae = load_part(config.model, "vae", DTYPES[config.model.dtype]).to(device)
    decoder = PictureDecoder(
        policy.family,
        vae,
        policy.shape,
        config.rollout.decode_batch_size,
        tiled=max(config.sampling.height, config.sampling.width)
        > config.rollout.decode_tile_above_px,
    )
    paths = []
    for prompt_number, x0 in enumerate(latents):
        for number, picture in enumerate(decoder.decode(x0)):
            paths.append(folder / f"{prompt_number}_{number}.png")
            Image.fromarray(picture.numpy()).save(paths[-1])
    return paths


def _make_writable(folder: Path) -> None:
    # Before anything is drawn, which takes minutes.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SampleError(f"--out {folder}: pictures cannot be written there: {error}") from error


def _check_finite(latents: Sequence[Tensor], prompts: Sequence[str], checkpoint: str) -> None:
    # The decoder would make a black picture of them.
    for prompt, x0 in zip(prompts, latents, strict=True):
        broken = int((~x0.isfinite().flatten(1).all(dim=1)).sum())
        if broken:
            raise SampleError(
                f"--checkpoint {checkpoint}: {broken} of {len(x0)} pictures have latents that are "
                f"not finite, prompt {prompt!r:.80}; nothing is saved. Draw from an earlier "
                "checkpoint, or with model.dtype: float32"
            )


@dataclass(frozen=True)
class Source:
    """A policy with the weights that were asked for, on the CPU."""

    policy: Policy
    back_to_base: Callable[[], None]
    """Give it the weights of ``model.path`` again, wherever it is by then."""


def load_source(config: Config, checkpoint: str, average: bool = False) -> Source:
    """Args: as of ``sample``.

    Raises:
        ModelFolderError, CheckpointError, RunFolderError, WeightMismatchError: the weights cannot
            be used.
    """
    path = None if checkpoint == "base" else checkpoint_named(config, checkpoint)
    if path is not None and (path / "state.json").exists():
        read_fitting_info(path, config.model)
        policy = load_policy(config)
        load_weights(policy, weights_in(config, path, average))
        lora = config.model.lora is not None
        return Source(
            policy, policy.transformer.disable_adapters if lora else _reload(policy, config)
        )
    if average:
        raise SampleError(f"{checkpoint} is no checkpoint of a run; only those hold an average")
    plain = config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})
    policy = load_policy(plain)
    if path is None:
        return Source(policy, lambda: None)
    if path.name == ADAPTER_FILE or (path / ADAPTER_FILE).exists():
        load_adapter(policy.transformer, path)
        return Source(policy, policy.transformer.disable_adapters)
    load_transformer_weights(policy.transformer, path)
    return Source(policy, _reload(policy, config))


def _reload(policy: Policy, config: Config) -> Callable[[], None]:
    def back_to_base() -> None:
        base = load_part(config.model, "transformer", DTYPES[config.model.dtype])
        policy.transformer.load_state_dict(base.state_dict())

    return back_to_base


def weights_in(config: Config, checkpoint: Path, average: bool = False) -> dict[str, Tensor]:
    """Trainable weights of a checkpoint (or their moving average) in the model's dtype."""
    dtype = DTYPES[config.model.dtype]
    return {name: tensor.to(dtype) for name, tensor in read_weights(checkpoint, average).items()}
