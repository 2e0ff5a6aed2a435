"""How a prompt is drawn: one file an algorithm, G2RPO and the baselines, all giving a ``Draw``."""

from g2rpo_ray.algorithms.base import Draw, Strategy
from g2rpo_ray.algorithms.flow_grpo import FlowGrpoStrategy
from g2rpo_ray.algorithms.g2rpo import G2rpoStrategy
from g2rpo_ray.algorithms.mix_grpo import MixGrpoStrategy
from g2rpo_ray.config import Config

__all__ = ["Draw", "Strategy", "make_strategy"]

STRATEGIES: dict[str, type[Strategy]] = {
    "g2rpo": G2rpoStrategy,
    "mix_grpo": MixGrpoStrategy,
    "flow_grpo": FlowGrpoStrategy,
    "dance_grpo": FlowGrpoStrategy,
}


def make_strategy(config: Config) -> Strategy:
    """The strategy that ``config.algorithm`` names."""
    return STRATEGIES[config.algorithm](config)
