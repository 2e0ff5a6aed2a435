"""What a scorer is: pictures and prompts in, one number for each picture out."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.section import Section

if TYPE_CHECKING:
    from torch import Tensor
else:
    # PyTorch's, for type checkers alone: settings are checked by scorers' modules, without PyTorch.
    Tensor = Any

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ScorerError(InputError):
    """A scorer cannot be set up or gave an unusable answer; the message names scorer and cause."""


class MissingPackageError(ScorerError):
    """An optional dependency is not installed here; another machine's environment may have it."""


class RewardScorer(ABC):
    """A reward model, without Ray. Importing its module must be cheap, as settings are checked by
    it: PyTorch and other libraries are imported where they are used."""

    class Options(Section):
        """Settings under ``rewards.<name>.options``; subclasses add theirs."""

    kind: ClassVar[str]
    """Name in ``rewards.<name>.kind``."""
    compares_pictures: bool = False
    """Whether a score depends on the other pictures of its request, which then stays whole: neither
    cut into passes nor merged with others."""
    reads_prompts: bool = True
    """Whether a score depends on the prompt."""

    @classmethod
    def check_files(cls, options: Any) -> None:  # noqa: ARG003  (many have none)
        """Look at the files of the class's own ``Options``, as far as that needs no model: before a
        run, anywhere.

        Raises:
            ScorerError: one is missing or cannot be used.
        """
        return

    @classmethod
    def check_prompt(cls, options: Any, prompt: str) -> None:  # noqa: ARG003  (many take any)
        """Look at a prompt without the model: before a run, and before pictures are scored.

        Raises:
            ScorerError: it lacks what this scorer judges by, such as metadata.
        """
        return

    @abstractmethod
    def __init__(self, options: Section, device: str) -> None:
        """Load the model; ``options`` is an instance of the class's own ``Options``."""

    @abstractmethod
    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Higher is better.

        Args:
            pictures: uint8 ``[B, H, W, 3]`` on the CPU.
            prompts: B texts; ``metadata_of(prompt)`` (common/prompt_text.py) is what the prompt
                file says of one beside the text, a mapping of plain values, often empty.

        Returns:
            float32 ``[B]`` on the CPU. NaN says "no answer"; an exception fails the request.
        """


def wanted_of(prompts: Sequence[str], read: Callable[[str], T]) -> list[T | None]:
    """What a scorer judges by, for each prompt; None, told in the log, for one that lacks it.

    Args:
        read: raises ScorerError for such a prompt; called once for each text and its metadata.

    Raises:
        ScorerError: all lack it; the first one's.
    """
    seen: dict[int, T | ScorerError] = {}
    for prompt in prompts:
        if id(prompt) not in seen:
            try:
                seen[id(prompt)] = read(prompt)
            except ScorerError as error:
                logger.warning("no score: %s", error)
                seen[id(prompt)] = error
    found = [seen[id(prompt)] for prompt in prompts]
    errors = [it for it in found if isinstance(it, ScorerError)]
    if errors and len(errors) == len(prompts):
        raise errors[0]
    return [None if isinstance(it, ScorerError) else it for it in found]


def check_request(pictures: Tensor, prompts: Sequence[str]) -> None:
    """Refuse what no scorer should see.

    Raises:
        ScorerError: not uint8 ``[B, H, W, 3]`` with B, H, W of 1 or more, or not B texts.
    """
    import torch

    wanted = "expected uint8 [B, H, W, 3] (g2rpo_ray.rewards.scorers.pictures makes it from files)"
    if pictures.dtype != torch.uint8:
        lost = ""
        if pictures.is_floating_point() and not bool(pictures.isfinite().all()):
            lost = f", {int((~pictures.isfinite()).sum())} values NaN or infinite"
        raise ScorerError(
            f"pictures are {str(pictures.dtype).removeprefix('torch.')}{lost}; {wanted}"
        )
    if pictures.ndim != 4 or pictures.shape[-1] != 3:
        raise ScorerError(f"pictures have shape {list(pictures.shape)}; {wanted}")
    if pictures.numel() == 0:
        raise ScorerError(f"pictures are empty: shape {list(pictures.shape)}; {wanted}")
    if len(prompts) != len(pictures):
        raise ScorerError(f"{len(prompts)} prompts came with {len(pictures)} pictures")


def check_scores(scores: object, expected: int) -> Tensor:
    """A scorer's answer as float32 ``[expected]``; NaN and infinity pass, the caller judges them.

    Raises:
        ScorerError: no tensor of real numbers, or not one for each picture.
    """
    import torch

    if not isinstance(scores, torch.Tensor):
        raise ScorerError(f"returned {type(scores).__name__}; expected a float32 tensor")
    if scores.is_complex() or scores.dtype == torch.bool:
        raise ScorerError(f"returned {scores.dtype}; expected float32")
    if scores.shape != (expected,):
        raise ScorerError(
            f"returned shape {tuple(scores.shape)} for {expected} pictures; expected ({expected},)"
        )
    return scores.detach().float().cpu()
