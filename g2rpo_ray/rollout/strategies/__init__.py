"""How a rollout is made: one file for each way to draw, all giving the same Draw."""

from g2rpo_ray.config import Config
from g2rpo_ray.rollout.strategies.base import Draw, Strategy
from g2rpo_ray.rollout.strategies.flow_grpo import DanceGrpoStrategy, FlowGrpoStrategy
from g2rpo_ray.rollout.strategies.g2rpo import G2rpoStrategy
from g2rpo_ray.rollout.strategies.mix_grpo import MixGrpoStrategy

__all__ = ["Draw", "Strategy", "make_strategy"]

STRATEGIES: dict[str, type[Strategy]] = {
    "g2rpo": G2rpoStrategy,
    "mix_grpo": MixGrpoStrategy,
    "flow_grpo": FlowGrpoStrategy,
    "dance_grpo": DanceGrpoStrategy,
}


def make_strategy(config: Config) -> Strategy:
    """The strategy that ``config.algorithm`` names."""
    return STRATEGIES[config.algorithm](config)
