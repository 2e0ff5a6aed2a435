"""scripts/soaking: the judge's moods against the product's own scorer, the plan, what has grown."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from g2rpo_ray.learner.worker import Learner
from g2rpo_ray.prompts.encoder import EncoderActor
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rollout.actor import RolloutActor
from soaking import judge as judge_module
from soaking.cluster import SHARED, held_by_living, made_with_a_card, shared_memory
from soaking.judge import RANGE, WRONG_ASKS, Judge, judging
from soaking.watch import growth, role_of
from soaking.week import MOODS, Ledger, Plan, grew

PICTURES = torch.tensor([[255, 0, 0], [0, 0, 255], [9, 9, 9]], dtype=torch.uint8)[:, None, None]
PROMPTS = ["a", "b", "c"]
SCORES = [1.0, -1.0, 0.0]


@pytest.fixture
def judge() -> Iterator[Judge]:
    with judging() as one:
        yield one


def scorer(judge: Judge, **options: Any) -> RewardScorer:
    limits = dict(zip(("minimum", "maximum"), RANGE, strict=True))
    return make_scorer("http", {"url": judge.url, "timeout_s": 20.0, **limits, **options}, "cpu")


def scores(one: RewardScorer) -> list[float]:
    return one.score(PICTURES, PROMPTS).tolist()


@pytest.mark.parametrize("mood", ["fair", "slow", "limiting"])
def test_its_scores_are_the_same_in_every_mood(
    judge: Judge, mood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_module, "SLOW_S", 0.2)
    judge.mood = mood
    assert [scores(scorer(judge)) for _ in range(2)] == [SCORES, SCORES]


def test_every_wrong_answer_is_noticed_and_the_next_ask_is_answered(judge: Judge) -> None:
    judge.mood = "wrong"
    for number in range(8):
        judge._numbers = iter(range(number, 1000, 8))  # type: ignore[assignment]
        judge._wrong_asks.clear()
        for _ in range(WRONG_ASKS):
            try:
                found = scores(scorer(judge))
            except ScorerError:
                continue
            # The client asks again where one is not finite.
            assert not torch.tensor(found).isfinite().all(), number
        assert scores(scorer(judge)) == SCORES


@pytest.mark.parametrize("mood", ["silent", "down"])
def test_who_waits_for_it_is_answered_when_it_is_back(judge: Judge, mood: str) -> None:
    judge.mood = mood
    started_s = time.monotonic()
    threading.Timer(1.0, lambda: setattr(judge, "mood", "fair")).start()
    assert scores(scorer(judge, tries=100)) == SCORES
    assert time.monotonic() - started_s >= 1.0


def test_a_plan_has_every_mood_and_both_losses() -> None:
    for iterations in (60, 1000):
        plan = Plan(iterations, disturbed=True)
        assert {mood for mood, _ in plan.moods().values()} == set(MOODS)
        assert set(plan.losses().values()) == {"worker", "node"}
    # While there is no worker, nobody meets the judge's mood.
    nodes = {at for at, lost in plan.losses().items() if lost == "node"}
    assert not any(at <= node <= at + 10 for at in plan.moods() for node in nodes)
    assert sum(seconds > 100 for _, seconds in plan.moods().values()) == 2
    assert not Plan(60, disturbed=False).moods() | Plan(60, disturbed=False).losses()


def test_what_grows_is_found() -> None:
    def samples(leak: float) -> list[dict[str, Any]]:
        parts = {"pss": 5.0, "store": 1.0, "objects": 1, "disk": 1.0, "ray_logs": 1.0}
        return [
            {"iteration": i, **parts}
            | {"roles": {"rank": {"pss": 100 + leak * i, "rss": 1, "files": 9, "threads": 3}}}
            for i in range(1000)
        ]

    for leak, expected in ((0.0, []), (0.05, ["rank pss"])):
        found = growth(samples(leak), 100)
        assert [name for name, it in found.items() if grew(name, **it)] == expected
    # As a week of sixty iterations saw them; and a leak.
    assert not grew("store", 14.5, 28.7)
    assert not grew("raylet rss", 94.8, 105.6)
    assert grew("store", 14.5, 50.0)
    assert grew("raylet rss", 94.8, 160.0)


def test_a_role_is_known_by_its_title() -> None:
    for kind, role in ((RolloutActor, "worker"), (Learner, "rank"), (EncoderActor, "encoder")):
        assert role_of(f"ray::{kind.__name__}.work") == role
    assert role_of("/somewhere/ray/core/src/ray/raylet/raylet") == "raylet"
    assert role_of("python") == "other"


def test_segments_of_other_programs_on_a_card_are_not_the_soaks() -> None:
    others = {"cuda.shm.0.79d5.1", "torch_31189_2824077458_0"}
    ours = {"torch_3118_1_0", "torch_311890_1_0", "plasma"}
    assert made_with_a_card(others | ours) == others


def test_a_ledger_goes_on_where_it_was_left(tmp_path: Path) -> None:
    Ledger(tmp_path / "x").add("mood", 3, mood="down")
    later = Ledger(tmp_path / "x")
    later.add("loss", 4, lost="node")
    assert [(it["what"], it["iteration"]) for it in later.lines] == [("mood", 3), ("loss", 4)]
    assert Ledger(tmp_path / "x").lines == later.lines


def test_a_semaphore_of_a_living_process_is_not_left_behind() -> None:
    before = shared_memory()
    lock = multiprocessing.get_context("spawn").Lock()
    name = lock._semlock.name.replace("/", "sem.")  # type: ignore[attr-defined]
    assert name in shared_memory() - before
    assert held_by_living({name, "left-by-nobody"}) == {name, "left-by-nobody"}
    file = SHARED / "left-behind-by-a-test"
    file.touch()
    try:
        assert held_by_living({file.name}) == set()
        with file.open():
            assert held_by_living({file.name}) == {file.name}
    finally:
        file.unlink()
