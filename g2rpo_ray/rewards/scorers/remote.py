"""A user's own scorer behind HTTP; docs/rewards.md describes the protocol."""

import math
from collections.abc import Sequence
from typing import Any, Self

from pydantic import model_validator

from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.rewards.scorer import RewardScorer, Tensor
from g2rpo_ray.rewards.scorers.endpoint import Endpoint, EndpointOptions, png_base64

PROTOCOL = 1


class HttpScorer(RewardScorer):
    """Posts ``{"protocol": 1, "prompts": [...], "pictures": [PNG as base64, ...]}`` and expects
    ``{"scores": [...]}``: one number for each picture, null for "no answer"."""

    class Options(EndpointOptions):
        """Settings of the ``http`` scorer."""

        reads_prompts: bool = True
        """Whether its scores depend on the prompt; false for one that judges pictures alone."""
        sends_metadata: bool = False
        """Whether the request has ``metadata``, too: for each prompt an object with what the prompt
        file says beside the text."""
        minimum: float | None = None
        """Smallest number that is an answer; none: any."""
        maximum: float | None = None
        """Largest number that is an answer; none: any."""

        @model_validator(mode="after")
        def _check(self) -> Self:
            low, high = self.minimum, self.maximum
            if low is not None and high is not None and low >= high:
                raise ValueError(f"minimum {low:g} is not below maximum {high:g}")
            return self

    kind = "http"

    def __init__(self, options: Options, device: str) -> None:  # noqa: ARG002
        self._endpoint = Endpoint(options, options.url)
        self._minimum = -math.inf if options.minimum is None else options.minimum
        self._maximum = math.inf if options.maximum is None else options.maximum
        self.reads_prompts, self._sends_metadata = options.reads_prompts, options.sends_metadata

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        request = {
            "protocol": PROTOCOL,
            "prompts": list(prompts),
            "pictures": [png_base64(picture) for picture in pictures],
        }
        if self._sends_metadata:
            request["metadata"] = [dict(metadata_of(prompt)) for prompt in prompts]
        answer = self._endpoint.post(request)
        return torch.tensor(self._scores_of(answer, len(pictures)), dtype=torch.float32)

    def _scores_of(self, answer: Any, expected: int) -> list[float]:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise self._endpoint.error(f'answered {answer!r:.100}; expected {{"scores": [...]}}')
        if len(scores) != expected:
            raise self._endpoint.error(f"{len(scores)} scores for {expected} pictures")
        for place, score in enumerate(scores):
            # In Python true is a number, in the protocol it is none.
            if score is not None and (
                isinstance(score, bool) or not isinstance(score, int | float)
            ):
                raise self._endpoint.error(f"score {place} is {score!r:.60}; expected a number")
            if score is not None and (score < self._minimum or score > self._maximum):
                raise self._endpoint.error(
                    f"score {place} is {score:g}; allowed {self._minimum:g} to {self._maximum:g}"
                )
        return [float("nan") if score is None else float(score) for score in scores]
