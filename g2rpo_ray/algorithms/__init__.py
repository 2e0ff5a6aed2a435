"""How a prompt is drawn: one file an algorithm, G2RPO and the baselines, all giving a ``Draw``."""

from g2rpo_ray.algorithms.base import Algorithm, Draw
from g2rpo_ray.algorithms.diffusion_nft import DiffusionNft
from g2rpo_ray.algorithms.e_grpo import EGrpo
from g2rpo_ray.algorithms.flow_grpo import FlowGrpo
from g2rpo_ray.algorithms.g2rpo import G2rpo
from g2rpo_ray.algorithms.mix_grpo import MixGrpo
from g2rpo_ray.config import Config

__all__ = ["Algorithm", "Draw", "make_algorithm"]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "g2rpo": G2rpo,
    "mix_grpo": MixGrpo,
    "flow_grpo": FlowGrpo,
    "dance_grpo": FlowGrpo,
    "e_grpo": EGrpo,
    "diffusion_nft": DiffusionNft,
}


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm that ``config.algorithm`` names."""
    return ALGORITHMS[config.algorithm](config)
