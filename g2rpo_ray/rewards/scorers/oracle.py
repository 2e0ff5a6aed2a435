"""The tiny world's program that checks whether a picture shows what its caption says."""

from collections.abc import Sequence

from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer, Tensor


class OracleScorer(RewardScorer):
    """1 where everything in the caption is right, else 0. To judge by, not to train on."""

    kind = "oracle"

    def __init__(self, options: Section, device: str) -> None:  # noqa: ARG002
        from g2rpo_ray.tiny_world.oracle import check

        self._check = check

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        return torch.from_numpy(self._check(pictures.numpy(), list(prompts)))
