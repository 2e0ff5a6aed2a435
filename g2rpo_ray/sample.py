"""Drawing pictures with the weights of a run, in this process, without Ray."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from g2rpo_ray.algorithm import noise
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoint import read_weights
from g2rpo_ray.models.flux import load_policy
from g2rpo_ray.models.loading import DTYPES, check_model_folder, load_part
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.models.weights import load_weights
from g2rpo_ray.rollout.sampler import Sampler
from g2rpo_ray.rollout.worker import schedule_of
from g2rpo_ray.run import checkpoint_named


def sample(
    config: Config,
    *,
    checkpoint: str,
    prompts: Sequence[str],
    pictures_per_prompt: int,
    seed: int,
    folder: Path,
) -> list[Path]:
    """Draw by ODE with ``evaluation.steps`` and save PNG files.

    Args:
        checkpoint: ``last``, ``base``, or the folder of a checkpoint.

    Returns:
        Paths, ``<prompt number>_<picture number>.png``, in the order of prompts.
    """
    check_model_folder(config.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(config).to(device)
    weights = weights_of(config, checkpoint)
    if weights is not None:
        load_weights(policy, weights)
    vae = load_part(config.model, "vae", DTYPES[config.model.dtype]).to(device)
    decoder = PictureDecoder(vae, policy.shape, config.rollout.decode_batch_size)
    encoder = TextEncoder(config.model, config.prompts.max_sequence_length, str(device))
    sigmas = schedule_of(config.sampling, config.evaluation.steps, policy.shape)
    sampler = Sampler(policy, sigmas, config.rollout.batch_size)

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for prompt_number, prompt in enumerate(prompts):
        start = torch.stack(
            [
                noise.normal(policy.shape.packed, "sample", seed, number)
                for number in range(pictures_per_prompt)
            ]
        )
        embeds = encoder.encode(prompt).to(device)
        pictures = decoder.decode(sampler.trajectory(start.to(device), embeds).x0)
        for number, picture in enumerate(pictures):
            paths.append(folder / f"{prompt_number}_{number}.png")
            Image.fromarray(picture.numpy()).save(paths[-1])
    return paths


def weights_of(config: Config, checkpoint: str) -> dict[str, Tensor] | None:
    """Trainable weights of a run's checkpoint in the model's dtype; None for ``base``."""
    if checkpoint == "base":
        return None
    dtype = DTYPES[config.model.dtype]
    weights = read_weights(checkpoint_named(config, checkpoint))
    return {name: tensor.to(dtype) for name, tensor in weights.items()}
