"""A vision-language model as judge, behind an OpenAI-compatible endpoint (vLLM, SGLang, ...)."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from pydantic import Field, model_validator

from g2rpo_ray.rewards.scorer import RewardScorer, Tensor
from g2rpo_ray.rewards.scorers.endpoint import Endpoint, EndpointOptions, png_base64

SCORE_TEMPLATE = (
    "The picture was made for this text: «{prompt}»\n"
    "Judge how well it shows what the text says, and how well it is made. Think in a few "
    "sentences, then end with one line: Final Score: N, where N is a number from 1 (worst) to 5."
)
NUMBER = r"([-+]?\d+(?:\.\d+)?)"


class JudgeScorer(RewardScorer):
    """One chat completion for each picture; the number is read from its text."""

    class Options(EndpointOptions):
        """Settings of the ``judge`` scorer; ``url`` ends before ``/chat/completions``."""

        model: str
        """Name under which the endpoint serves the model."""
        template: str = SCORE_TEMPLATE
        """The question; ``{prompt}`` stands for the picture's text."""
        pattern: str = rf"Final Score:\s*{NUMBER}"
        """Regular expression with one group, the number; it must match one number exactly."""
        numbers: int = Field(1, ge=1)
        """How many numbers it must match; with more than one, the score is their mean."""
        words: dict[str, float] = Field(default_factory=dict)
        """What words in the group stand for, such as ``{good: 1, bad: 0}``."""
        minimum: float = 1.0
        """Smallest number that is an answer."""
        maximum: float = 5.0
        """Largest number that is an answer."""
        max_tokens: int = Field(512, ge=1)
        """Longest answer, in tokens."""
        temperature: float = Field(0.0, ge=0)
        """0 takes the likeliest answer, so that the same picture gets the same score."""

        @model_validator(mode="after")
        def _check(self) -> Self:
            if "{prompt}" not in self.template:
                raise ValueError("template lacks {prompt}")
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(f"pattern is no regular expression: {error}") from error
            if groups != 1:
                raise ValueError(f"pattern has {groups} groups; it needs one, around the number")
            if self.minimum >= self.maximum:
                raise ValueError(f"minimum {self.minimum:g} is not below maximum {self.maximum:g}")
            return self

    kind = "judge"

    def __init__(self, options: Options, device: str) -> None:  # noqa: ARG002
        self._options = options
        self._endpoint = Endpoint(options, options.url.rstrip("/") + "/chat/completions")

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        with ThreadPoolExecutor(self._options.concurrency) as pool:
            scores = list(pool.map(self._judge, pictures.unsqueeze(1), prompts))
        return torch.tensor(scores, dtype=torch.float32)

    def _judge(self, pictures: Tensor, prompt: str) -> float:
        """The answer's number about uint8 ``[N, H, W, 3]``, shown in this order."""
        # Not str.format: the template and the prompt may hold other braces.
        question = self._options.template.replace("{prompt}", prompt)
        urls = [f"data:image/png;base64,{png_base64(picture)}" for picture in pictures]
        content: list[dict[str, Any]] = [
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
            {"type": "text", "text": question},
        ]
        answer = self._endpoint.post(
            {
                "model": self._options.model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": self._options.max_tokens,
                "temperature": self._options.temperature,
            }
        )
        return self.parse(self._text_of(answer))

    def parse(self, text: str) -> float:
        """The number in a judge's answer, or the mean of its ``numbers``.

        Raises:
            ScorerError: there are fewer or more, or one is out of range.
        """
        options, shown = self._options, f"the judge's answer {text[-120:]!r}"
        numbers = []
        for found in re.findall(options.pattern, text):
            try:
                numbers.append(options.words[found] if found in options.words else float(found))
            except ValueError as error:
                raise self._endpoint.error(f"the judge's {found!r:.60} is no number") from error
        if options.numbers == 1:
            # The same judgement may stand there twice.
            numbers = list(dict.fromkeys(numbers))
        if len(numbers) != options.numbers:
            raise self._endpoint.error(
                f"{shown} has {len(numbers)} numbers that match {options.pattern!r}; expected "
                f"{options.numbers}"
            )
        for number in numbers:
            if not options.minimum <= number <= options.maximum:
                raise self._endpoint.error(
                    f"{shown} gives {number:g}; allowed {options.minimum:g} to {options.maximum:g}"
                )
        return sum(numbers) / len(numbers)

    def _text_of(self, answer: Any) -> str:
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise self._endpoint.error(
                f"answered {answer!r:.100}; expected a chat completion"
            ) from error
        if not isinstance(text, str):
            raise self._endpoint.error(f"the answer's content is {type(text).__name__}")
        if choice.get("finish_reason") == "length":
            raise self._endpoint.error(
                f"the answer was cut at max_tokens {self._options.max_tokens}"
            )
        return text
