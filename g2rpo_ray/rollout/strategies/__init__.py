"""How a rollout is made: one file for each algorithm, all giving the same Draw."""

from g2rpo_ray.config import Config
from g2rpo_ray.rollout.strategies.base import Draw, Strategy
from g2rpo_ray.rollout.strategies.g2rpo import G2rpoStrategy

__all__ = ["Draw", "Strategy", "make_strategy"]

STRATEGIES: dict[str, type[Strategy]] = {"g2rpo": G2rpoStrategy}


def make_strategy(config: Config) -> Strategy:
    """The strategy that ``config.algorithm`` names."""
    return STRATEGIES[config.algorithm](config)
