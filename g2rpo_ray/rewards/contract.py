"""What every scorer must do, as checks that anyone can run on their own.

    python -m g2rpo_ray.rewards.contract python '{"target": "my_package.scorers:Sharpness"}'

From a test: ``check_scorer(make_scorer(kind, options, "cpu"))``.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from g2rpo_ray.common.prompt_text import PromptText, metadata_of
from g2rpo_ray.common.tokenizers import UNLIKE
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError, check_request, check_scores

ODD_PROMPTS = {
    "empty": "",
    "blank": " \t\n ",
    "10,000 characters": "a red fox " * 1000,
    "Chinese": "一只戴着红帽子的狐狸",
    "Arabic": "ثعلب أحمر في الثلج",
    "emoji": "🦊👩‍👩‍👧‍👦 ❄️",
    "NUL": "a red\0 fox",
    "braces and quotes": '{prompt} "%s" \\ {0} <|endoftext|>',
}
ODD_METADATA = {"category": "动物", "include": [{"class": "fox", "count": 1}], "": None}
ODD_SIZES = {"one pixel": (1, 1), "portrait": (90, 40), "landscape": (31, 77), "large": (720, 720)}
TOLERANCE = 1e-4


class ContractError(ScorerError):
    """A scorer broke a rule; the message names rule and numbers."""


def check_scorer(
    scorer: RewardScorer, prompt: str = "a red fox in the snow", tolerance: float = TOLERANCE
) -> list[str]:
    """Ask a scorer everything that a run may ask it.

    Args:
        prompt: one that it can judge; the other prompts get its metadata.
        tolerance: difference that counts as equal, relative above 1; half precision needs 5e-3.

    Returns:
        What was checked, a line each.

    Raises:
        ContractError: the first rule that it breaks.
    """
    pictures = _noise(4, 64, 64)
    first = _ask(scorer, "four pictures", pictures, [prompt] * 4)
    again = _ask(scorer, "again", pictures, [prompt] * 4)
    _same("the same request twice", first, again, tolerance)
    alone = [_ask(scorer, "one picture", pictures[i : i + 1], [prompt]) for i in range(4)]
    _same("pictures scored alone", first, torch.cat(alone), tolerance)
    turned = _ask(scorer, "reversed", pictures.flip(0), [prompt] * 4).flip(0)
    _same("pictures in reverse order", first, turned, tolerance)
    passed = ["float32 [B], finite", "repeatable", "independent of what is scored beside it"]
    known = dict(metadata_of(prompt))
    passed += _reads_prompts(scorer, pictures, known) if scorer.reads_prompts else []
    odd: dict[str, tuple[Tensor, str]] = {
        f"prompt: {name}": (pictures[:1], PromptText(text, known))
        for name, text in ODD_PROMPTS.items()
    }
    odd["prompt: with metadata"] = pictures[:1], PromptText(prompt, ODD_METADATA | known)
    for name, (height, width) in ODD_SIZES.items():
        odd[f"picture: {name}, {height}x{width}"] = _noise(1, height, width), prompt
    for name, level in {"black": 0, "white": 255}.items():
        odd[f"picture: {name}"] = torch.full((1, 64, 64, 3), level, dtype=torch.uint8), prompt
    for what, (picture, text) in odd.items():
        _ask(scorer, what, picture, [text])
    return [*passed, *odd]


def _reads_prompts(scorer: RewardScorer, pictures: Tensor, known: dict[str, Any]) -> list[str]:
    one, other = (
        _ask(scorer, text, pictures, [PromptText(text, known)] * len(pictures)) for text in UNLIKE
    )
    if not torch.equal(one, other):
        return ["unlike prompts are told apart"]
    if known and not _answers(scorer, pictures[:1], UNLIKE[0]):
        return ["judged by metadata: a text without them has no score"]
    if bool((one == one[0]).all()):
        # A judge or a program, of few numbers: noise shows nothing of either prompt.
        return []
    raise ContractError(
        f"{UNLIKE[0]!r} and {UNLIKE[1]!r}: the same scores {one.tolist()}; the prompt is not read "
        "(is the tokenizer's vocabulary there?). A scorer of pictures alone says reads_prompts = "
        "False"
    )


def _answers(scorer: RewardScorer, pictures: Tensor, prompt: str) -> bool:
    try:
        return bool(scorer.score(pictures, [prompt]).isfinite().all())
    except ScorerError:
        return False


def _noise(count: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(count * height + width)
    size = (count, height, width, 3)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def _ask(scorer: RewardScorer, what: str, pictures: Tensor, prompts: list[str]) -> Tensor:
    check_request(pictures, prompts)
    before = pictures.clone()
    try:
        scores = check_scores(scorer.score(pictures, prompts), len(pictures))
    except Exception as error:
        raise ContractError(f"{what}: {type(error).__name__}: {error}") from error
    if not bool(scores.isfinite().all()):
        raise ContractError(f"{what}: scores {scores.tolist()}; expected finite numbers")
    if not torch.equal(before, pictures):
        raise ContractError(f"{what}: the scorer changed the pictures that it was given")
    return scores


def _same(what: str, first: Tensor, second: Tensor, tolerance: float) -> None:
    difference = float((first - second).abs().max())
    if difference > tolerance * max(1.0, float(first.abs().max())):
        raise ContractError(f"{what}: scores differ by {difference:.2g}; expected the same")


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m g2rpo_ray.rewards.contract KIND OPTIONS_AS_JSON")
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    try:
        passed = check_scorer(make_scorer(kind, options, "cpu"))
    except (ScorerError, ValueError) as error:
        raise SystemExit(f"{kind}: {error}") from error
    print("\n".join(f"ok  {line}" for line in passed))


if __name__ == "__main__":
    main()
