"""The worker on the small world: what it counts, and what becomes of broken pictures."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from g2rpo_ray.algorithms import Algorithm, Draw, make_algorithm
from g2rpo_ray.rollout.answers import BrokenLatentsError
from g2rpo_ray.rollout.worker import RolloutWorker
from tests.rollout.tiny import ALGORITHMS
from tests.tiny import KnownScores, Redness, encode, tiny_config

REDNESS = Redness(["clip", "hps", "oracle"])


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "diffusion_nft"])
def test_pictures_and_evaluations_are_counted_where_they_are_made(
    tmp_path: Path, algorithm: str
) -> None:
    config = tiny_config(tmp_path, f"algorithm={algorithm}", "mix_grpo.window=2", "e_grpo.first=3")
    summary, group = RolloutWorker(config, REDNESS).rollout(encode(config)[0], 0, iteration=0)
    counts = make_algorithm(config).counts(0)
    assert summary.pictures == counts.pictures
    assert summary.evaluations == group.evaluations == counts.evaluations
    assert group.rewards.shape[2:] == (counts.groups, config.sampling.members)
    assert bool(group.rewards.isfinite().all())


class _BreaksOneMember:
    """A algorithm whose member 1 ends in infinite latents at its first trained step."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def draw(self, *args: Any) -> Draw:
        draw = self.algorithm.draw(*args)
        finished = [(positions, x0.clone()) for positions, x0 in draw.finished]
        dict((positions[0], x0) for positions, x0 in finished)[0][0, 1] = math.inf
        return replace(draw, finished=iter(finished))


def test_a_picture_of_infinite_latents_is_an_invalid_reward(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "advantage.on_invalid=drop_group")
    worker = RolloutWorker(config, REDNESS)
    worker.algorithm = _BreaksOneMember(worker.algorithm)  # type: ignore[assignment]
    summary, group = worker.rollout(encode(config)[0], 0, iteration=0)
    broken = torch.zeros_like(group.rewards, dtype=torch.bool)
    broken[:, 0, 0, 1] = True
    assert torch.equal(group.rewards.isnan(), broken)
    assert len(summary.failures) == 1
    assert "1 of 8 pictures have latents that are not finite" in summary.failures[0]


def test_infinite_latents_stop_the_run_where_that_is_configured(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    worker = RolloutWorker(config, REDNESS)
    worker.algorithm = _BreaksOneMember(worker.algorithm)  # type: ignore[assignment]
    prompt = encode(config)[0]
    with pytest.raises(BrokenLatentsError, match=r"1 of 8 pictures .*'a red circle"):
        worker.rollout(prompt, 0, iteration=0)


def break_second(worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of the second held-out picture is NaN."""
    walk = worker.walk

    def broken_walk(*args: Any) -> torch.Tensor:
        x0 = walk(*args).clone()
        x0[1, 3] = math.nan
        return x0

    monkeypatch.setattr(worker, "walk", broken_walk)


def test_a_held_out_picture_of_broken_latents_has_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(
        tmp_path, "advantage.on_invalid=drop_group", "evaluation.pictures_per_prompt=3"
    )
    worker = RolloutWorker(config, REDNESS)
    break_second(worker, monkeypatch)
    result = worker.evaluate(encode(config)[0])
    for scores in result.scores.values():
        assert scores.isfinite().tolist() == [True, False, True]
    assert result.broken_pictures == 1
    assert len(result.failures) == 1
    assert "1 of 3 pictures have latents that are not finite" in result.failures[0]


def test_broken_held_out_latents_stop_the_run_where_that_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, "evaluation.pictures_per_prompt=2")
    worker = RolloutWorker(config, REDNESS)
    break_second(worker, monkeypatch)
    prompt = encode(config)[0]
    with pytest.raises(BrokenLatentsError, match=r"1 of 2 pictures .*'a red circle"):
        worker.evaluate(prompt)


class _Silent(Redness):
    """Gives no score, and says why."""

    def submit(
        self, prompt_id: int, prompt: str, pictures: torch.Tensor, names: list[str]
    ) -> KnownScores:
        scores = super().submit(prompt_id, prompt, pictures, names).scores
        nothing = {name: torch.full_like(values, torch.nan) for name, values in scores.items()}
        return KnownScores(nothing, failures=["the judge is silent"])


def test_a_held_out_score_that_is_missing_has_its_cause(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    result = RolloutWorker(config, _Silent(["hps"])).evaluate(encode(config)[0])
    assert result.failures == ["the judge is silent"]
