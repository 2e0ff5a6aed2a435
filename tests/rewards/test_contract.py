"""The contract holds for every local scorer, and finds scorers that break it."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.contract import ContractError, check_scorer
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import RewardScorer
from random_hpsv3 import write_hpsv3
from tests.rewards.small_models import aesthetic_options, pickscore_options

CLIP = {"architecture": "local-dir:tiny_world:clip"}
HPS = {"checkpoint": "tiny_world:hps/HPS_tiny.pt", "architecture": "local-dir:tiny_world:hps"}


@pytest.mark.parametrize("kind", ["hps", "clip", "pickscore", "aesthetic", "hpsv3"])
def test_a_scorer_answers_whatever_a_run_may_ask(kind: str, tmp_path: Path) -> None:
    options: dict[str, Callable[[], dict[str, Any]]] = {
        "hps": lambda: HPS,
        "clip": lambda: CLIP,
        "pickscore": lambda: pickscore_options(tmp_path),
        "aesthetic": lambda: aesthetic_options(tmp_path),
        "hpsv3": lambda: write_hpsv3(tmp_path),
    }
    passed = check_scorer(make_scorer(kind, options[kind](), "cpu"))
    assert len(passed) == (18 if kind == "aesthetic" else 19)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_and_keeps_the_contract(dtype: str) -> None:
    exact = make_scorer("clip", CLIP, "cpu")
    half = make_scorer("clip", CLIP | {"dtype": dtype}, "cpu")
    check_scorer(half, tolerance=5e-3)
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (8, 64, 64, 3), dtype=torch.uint8, generator=generator)
    prompts = ["a red circle left of a green triangle"] * 8
    difference = (half.score(pictures, prompts) - exact.score(pictures, prompts)).abs().max()
    assert 0 < float(difference) < 0.02


class _Breaks(RewardScorer):
    """Mean brightness, until ``wish`` decides otherwise."""

    kind = "breaks"
    reads_prompts = False

    def __init__(self, options: Section, device: str) -> None: ...

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = pictures.float().mean(dim=(1, 2, 3))
        if self.wish == "batch":
            return scores - scores.mean()
        if self.wish == "random":
            return scores + torch.rand(len(scores))
        if self.wish == "long" and len(prompts[0]) > 1000:
            raise IndexError("index out of range in self")
        if self.wish == "blank" and not prompts[0].strip():
            return scores * torch.nan
        if self.wish == "strings":
            return [str(score) for score in scores]  # type: ignore[return-value]
        if self.wish == "changes":
            pictures.zero_()
        if self.wish == "few":
            return torch.zeros_like(scores)
        if self.wish == "shape":
            return scores[:, None]
        return scores

    wish = ""


@pytest.mark.parametrize(
    ("wish", "cause"),
    [
        ("batch", "pictures scored alone: scores differ by"),
        ("random", "the same request twice: scores differ by"),
        ("long", "prompt: 10,000 characters: IndexError: index out of range"),
        ("blank", "prompt: empty: scores [nan]"),
        ("strings", "four pictures: ScorerError: returned list; expected a float32 tensor"),
        ("changes", "four pictures: the scorer changed the pictures"),
        ("shape", "four pictures: ScorerError: returned shape (4, 1)"),
        ("reads nothing", "'red cat' and 'sky fog': the same scores ["),
    ],
)
def test_a_broken_scorer_is_found_out(wish: str, cause: str) -> None:
    scorer = _Breaks(Section(), "cpu")
    scorer.wish, scorer.reads_prompts = wish, wish == "reads nothing"
    with pytest.raises(ContractError) as caught:
        check_scorer(scorer)
    assert cause in str(caught.value)


def test_few_numbers_on_noise_show_nothing_of_the_prompt() -> None:
    scorer = _Breaks(Section(), "cpu")
    scorer.wish, scorer.reads_prompts = "few", True
    assert len(check_scorer(scorer)) == 18


def test_the_contract_runs_from_the_command_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = f'{{"target": "tests.rewards.fakes:ObedientScorer", "options": {{"log": "{log}"}}}}'
    command = [sys.executable, "-m", "g2rpo_ray.rewards.contract", "python"]
    root = Path(__file__).parents[2]
    good = subprocess.run([*command, options], capture_output=True, text=True, cwd=root)
    assert good.returncode == 0, good.stderr
    assert "ok  prompt: NUL" in good.stdout
    bad = subprocess.run([*command, '{"target": "no.such:Scorer"}'],
                         capture_output=True, text=True, cwd=root)  # fmt: skip
    assert bad.returncode == 1
    assert "python: python scorer 'no.such:Scorer' cannot be imported" in bad.stderr
