"""UnifiedReward (arXiv 2503.05236) behind an OpenAI-compatible endpoint, asked as its cards say."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from g2rpo_ray.rewards.scorer import Tensor
from g2rpo_ray.rewards.scorers.judge import JudgeScorer

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
"""Options by the name of a preset."""
PAIRS = "pair"
"""How the names of presets that compare two pictures begin."""


class UnifiedRewardScorer(JudgeScorer):
    """One chat completion for each picture: 1 to 5; or for each pair of a prompt's pictures: the
    mean over a picture's pairs of 1 where it is the better one, 0 where not, .5 where equal."""

    class Options(JudgeScorer.Options):
        preset: Literal["point", "point_axes", "pair", "pair_axes", "pair_think"] = "point"
        """Whose question is asked and how its answer is read, where ``template``, ``pattern`` and
        the like do not say otherwise: of UnifiedReward, of UnifiedReward-2.0 (``axes``: the mean of
        alignment, coherence and style), or of UnifiedReward-Think."""
        opponents: int = Field(4, ge=1)
        """With ``pair...``: a picture is the first of two beside each of this many that follow it
        in a ring of its prompt's pictures in the request, and the second as often."""

        @model_validator(mode="before")
        @classmethod
        def _fill(cls, given: dict[str, Any]) -> dict[str, Any]:
            return PRESETS.get(str(given.get("preset", "point")), {}) | given

    kind = "unified_reward"

    def __init__(self, options: Options, device: str) -> None:
        super().__init__(options, device)
        self.compares_pictures = options.preset.startswith(PAIRS)
        self._opponents = options.opponents

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        if not self.compares_pictures:
            return super().score(pictures, prompts)
        pairs = ring_pairs(prompts, self._opponents)
        with ThreadPoolExecutor(self._options.concurrency) as pool:
            wins = list(
                pool.map(lambda pair: self._judge(pictures[list(pair)], prompts[pair[0]]), pairs)
            )
        won, asked = torch.zeros(len(pictures)), torch.zeros(len(pictures))
        for (first, second), share in zip(pairs, wins, strict=True):
            won[first] += share
            won[second] += 1 - share
            asked[first] += 1
            asked[second] += 1
        # 0 / 0 is NaN: no other picture of the prompt to compare with.
        return won / asked


def ring_pairs(prompts: Sequence[str], opponents: int) -> list[tuple[int, int]]:
    """Places of the pictures that are shown first and second."""
    pairs = []
    for prompt in dict.fromkeys(prompts):
        ring = [place for place, other in enumerate(prompts) if other == prompt]
        for ahead in range(1, min(opponents, len(ring) - 1) + 1):
            pairs += [(it, ring[(n + ahead) % len(ring)]) for n, it in enumerate(ring)]
    return pairs
