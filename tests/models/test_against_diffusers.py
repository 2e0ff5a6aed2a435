"""Our encoders, policy, sampler and decoder against diffusers' own FluxPipeline."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.maths import noise
from g2rpo_ray.models.loading import load_part
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.sampling.engine import schedule_of
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.sampler import Sampler
from tests.tiny import CAPTIONS, tiny_config

TEXTS = [*CAPTIONS, "", "a cat", "红色圆圈 🔴", "a red circle " * 40]


@pytest.fixture(scope="module")
def pipeline() -> FluxPipeline:
    pipeline = FluxPipeline.from_pretrained(resolve_path("tiny_world:flux"), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = tmp_path_factory.mktemp("run")
    return tiny_config(folder, "sampling.steps=6")


@pytest.fixture(scope="module")
def encoder(config: Config) -> TextEncoder:
    return TextEncoder(config.model, config.prompts.max_sequence_length)


@pytest.fixture(scope="module")
def policy(config: Config) -> Policy:
    return load_policy(config)


@pytest.mark.parametrize("text", TEXTS)
def test_embeddings_equal_the_pipelines(
    pipeline: FluxPipeline, encoder: TextEncoder, config: Config, text: str
) -> None:
    length = config.prompts.max_sequence_length
    with torch.inference_mode():
        t5, pooled, _ = pipeline.encode_prompt(text, prompt_2=None, max_sequence_length=length)
    embeds = encoder.encode(text)
    assert torch.equal(embeds["t5"], t5[0])
    assert torch.equal(embeds["pooled"], pooled[0])


@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
def test_a_picture_equals_the_pipelines(
    pipeline: FluxPipeline, encoder: TextEncoder, config: Config, size: tuple[int, int]
) -> None:
    height, width = size
    sampling = config.sampling.model_copy(update={"height": height, "width": width})
    sized = config.model_copy(update={"sampling": sampling})
    policy = load_policy(sized)
    start = noise.normal(policy.shape.packed, "test", 1)[None]
    embeds = encoder.encode(CAPTIONS[0])
    sampler = Sampler(Evaluator(policy, 1), schedule_of(sampling, sampling.steps, policy))
    vae = load_part(config.model, "vae", torch.float32)
    x0 = sampler.trajectory(start, embeds).x0
    ours = PictureDecoder(policy.family, vae, policy.shape, 1).decode(x0)[0].numpy()

    theirs = pipeline(
        CAPTIONS[0],
        height=height,
        width=width,
        num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance,
        latents=start,
        max_sequence_length=config.prompts.max_sequence_length,
    ).images[0]
    difference = np.abs(ours.astype(int) - np.asarray(theirs).astype(int))
    assert ours.shape == (height, width, 3)
    # Timesteps differ in the last float32 bit: a value that lies on a border rounds the other way.
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.001


def test_a_decoded_batch_equals_single_pictures(policy: Policy, config: Config) -> None:
    vae = load_part(config.model, "vae", torch.float32)
    latents = noise.normal((5, *policy.shape.packed), "test", 2)
    together = PictureDecoder(policy.family, vae, policy.shape, 2).decode(latents)
    alone = PictureDecoder(policy.family, vae, policy.shape, 1).decode(latents)
    assert together.dtype == torch.uint8
    assert together.shape == (5, 64, 64, 3)
    assert int((together.int() - alone.int()).abs().max()) <= 1


def test_velocities_are_float32(policy: Policy, encoder: TextEncoder) -> None:
    embeds = encoder.encode("a cat")
    with torch.no_grad():
        velocity = policy(
            noise.normal((3, *policy.shape.packed), "test", 3),
            torch.tensor([1.0, 0.5, 0.1]),
            embeds,
        )
    assert velocity.dtype == torch.float32
