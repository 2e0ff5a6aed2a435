"""The settings that an evaluation's own roles run with."""

from typing import NamedTuple

from g2rpo_ray.config import Config

BLOCK_BYTES = 4096
"""Files take whole ones on most disks."""


class Files(NamedTuple):
    """What is to be written."""

    size_bytes: int
    words: str


def at_deployment_size(config: Config) -> Config:
    """``config`` with ``evaluation.height`` and ``width`` in place of the training's size."""
    sampling = config.sampling.model_copy(update=config.deployment_size)
    return config.model_copy(update={"sampling": sampling})


def size_words(config: Config) -> str:
    """The size of pictures to judge by, and what chooses it."""
    size = config.deployment_size
    return f"{size['width']} x {size['height']} pixels (evaluation.width, evaluation.height)"


def png_files(config: Config, pictures: int) -> Files:
    """At most: of pictures of the deployment's size that cannot be compressed."""
    size = config.deployment_size
    # A byte of each row says how it is filtered.
    pixels_bytes = size["height"] * (3 * size["width"] + 1)
    each = -(-pixels_bytes // BLOCK_BYTES) * BLOCK_BYTES
    words = f"a folder of {pictures} PNG files of {size['width']} x {size['height']} pixels"
    return Files(pictures * each, f"{words} at their largest")


def for_evaluation_workers(config: Config) -> Config:
    """``config`` for a pool of the workers that evaluate while a run trains."""
    count = config.evaluation.workers
    workers = {"workers": count, "min_workers": 1, "max_workers": None}
    rollout = config.rollout.model_copy(update=workers)
    return at_deployment_size(config).model_copy(update={"rollout": rollout})
