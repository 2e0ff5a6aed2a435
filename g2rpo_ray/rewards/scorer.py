"""What a scorer is: pictures and prompts in, one number for each picture out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from g2rpo_ray.config import Section
from g2rpo_ray.errors import InputError


class ScorerError(InputError):
    """A scorer cannot be set up or gave an unusable answer; the message names scorer and cause."""


class RewardScorer(ABC):
    """A reward model. Importing its module must be cheap: load libraries in ``__init__``."""

    class Options(Section):
        """Settings under ``rewards.<name>.options``; subclasses add theirs."""

    kind: ClassVar[str]
    """Name in ``rewards.<name>.kind``."""

    @abstractmethod
    def __init__(self, options: Section, device: str) -> None:
        """Load the model; ``options`` is an instance of the class's own ``Options``."""

    @abstractmethod
    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Higher is better.

        Args:
            pictures: uint8 ``[B, H, W, 3]`` on the CPU.
            prompts: B texts.

        Returns:
            float32 ``[B]`` on the CPU. NaN says "no answer"; an exception fails the request.
        """
