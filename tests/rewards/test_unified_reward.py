"""UnifiedReward's presets against a real server: what is asked, and how answers are read."""

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from g2rpo_ray.rewards.registry import make_scorer, parse_options
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers.unified_reward import PRESETS, ring_pairs
from tests.rewards.judge_server import Answer, FakeEndpoint, serving

LEVELS = [40, 10, 30, 20]
PICTURES = torch.tensor(LEVELS, dtype=torch.uint8)[:, None, None, None].expand(4, 4, 6, 3)
AXES = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"
PAIR_AXES = "\n\n".join(
    f"{it} Score:\n Image 1: {{}}\n Image 2: {{}}" for it in ("Alignment", "Coherence", "Style")
)


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    with serving() as endpoint:
        yield endpoint


def scorer(server: FakeEndpoint, preset: str, **options: Any) -> RewardScorer:
    settings = {"url": f"{server.url}/v1", "model": "UnifiedReward", "preset": preset, "tries": 1}
    return make_scorer("unified_reward", settings | options, "cpu")


def says(text: str) -> Answer:
    return Answer({"choices": [{"message": {"role": "assistant", "content": text}}]})


def shown(request: dict[str, Any]) -> tuple[list[int], str]:
    """Grey levels of the pictures of a request, in their order, and its words."""
    *pictures, text = request["messages"][0]["content"]
    data = [base64.b64decode(it["image_url"]["url"].partition(",")[2]) for it in pictures]
    return [int(np.array(Image.open(io.BytesIO(it))).mean()) for it in data], text["text"]


def prefers_light(server: FakeEndpoint, words: dict[int, str]) -> None:
    """Answers by the grey levels: words for -1 (the second is lighter), 0, 1 (the first is)."""

    def take(path: str, headers: dict[str, str], body: bytes) -> Answer:  # noqa: ARG001
        request = json.loads(body)
        server.requests.append(request)
        (first, second), _ = shown(request)
        return says(words[(first > second) - (first < second)])

    server.take = take  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("preset", "answer", "score"),
    [
        ("point", "fox (animal): 1\nsnow (scene): 0\nFinal Score: 3.5", 3.5),
        ("point_axes", AXES.format(2.694700002670288, 2.3715, 2.8025), 2.6229),
        ("point_axes", AXES.format(2, 2, 2), 2),
    ],
)
def test_a_picture_is_judged_as_its_card_says(
    server: FakeEndpoint, preset: str, answer: str, score: float
) -> None:
    server.answers = [says(answer)]
    scores = scorer(server, preset, concurrency=1).score(PICTURES, ["a fox", "b {x}", "c", "d"])
    torch.testing.assert_close(scores, torch.full((4,), float(score)), rtol=0, atol=1e-4)
    for request, level, prompt in zip(
        server.requests, LEVELS, ["a fox", "b {x}", "c", "d"], strict=True
    ):
        levels, text = shown(request)
        assert levels == [level]
        assert text == PRESETS[preset]["template"].replace("{prompt}", prompt)
        assert text.endswith(f"Text Caption: [{prompt}]")
        assert request["max_tokens"] == 512


RANKED = {1: "Image 1 is better", -1: "Image 2 is better"}


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("pair", RANKED | {0: "I would say: Both images are equally good."}),
        ("pair_think", {it: f"<think>Image {it} 7/10\n</think>\n<answer>{word}</answer>"
                        for it, word in RANKED.items()}),
        ("pair_axes", {1: PAIR_AXES.format(*[1, 0] * 3), -1: PAIR_AXES.format(*[0, 1.0] * 3)}),
    ],
)  # fmt: skip
def test_pairs_rank_a_prompts_pictures(
    server: FakeEndpoint, preset: str, words: dict[int, str]
) -> None:
    prefers_light(server, words)
    judge = scorer(server, preset, opponents=9)
    assert judge.compares_pictures
    # 40 beats three of three, 30 two, 20 one, 10 none; each pair is asked in both orders.
    torch.testing.assert_close(
        judge.score(PICTURES, ["a fox"] * 4), torch.tensor([1, 0, 2 / 3, 1 / 3])
    )
    assert len(server.requests) == 12
    pairs = {tuple(shown(request)[0]) for request in server.requests}
    assert pairs == {(a, b) for a in LEVELS for b in LEVELS if a != b}
    assert all("two" in shown(request)[1] for request in server.requests)


def test_a_first_picture_that_always_wins_gives_all_the_same(server: FakeEndpoint) -> None:
    server.answers = [says("Image 1 is better")]
    scores = scorer(server, "pair", opponents=1).score(PICTURES, ["a fox"] * 4)
    assert scores.tolist() == [0.5] * 4
    assert len(server.requests) == 4


def test_equal_pictures_and_shares_count_in_part(server: FakeEndpoint) -> None:
    prefers_light(server, RANKED | {0: "Both images are equally good."})
    same = PICTURES[[0, 0, 1]]
    scores = scorer(server, "pair").score(same, ["a fox"] * 3)
    assert scores.tolist() == [0.75, 0.75, 0]
    server.take = FakeEndpoint.take.__get__(server)  # type: ignore[method-assign]
    server.answers = [says(PAIR_AXES.format(0.6, 0.4, 0.75, 0.25, 0.45, 0.55))]
    scores = scorer(server, "pair_axes", opponents=1).score(PICTURES[:2], ["a fox"] * 2)
    torch.testing.assert_close(scores, torch.tensor([0.5, 0.5]))


def test_only_pictures_of_one_prompt_are_compared(server: FakeEndpoint) -> None:
    prefers_light(server, RANKED)
    scores = scorer(server, "pair").score(PICTURES, ["a fox", "two dogs", "a fox", "alone"])
    assert scores[[0, 2]].tolist() == [1, 0]
    assert scores[[1, 3]].isnan().all()
    assert {tuple(shown(it)[0]) for it in server.requests} == {(40, 30), (30, 40)}


@pytest.mark.parametrize(("pictures", "opponents"), [(24, 4), (5, 2), (2, 4), (3, 9)])
def test_every_picture_is_first_as_often_as_second(pictures: int, opponents: int) -> None:
    pairs = ring_pairs(["a"] * pictures, opponents)
    assert len(set(pairs)) == len(pairs) == pictures * min(opponents, pictures - 1)
    assert all(first != second for first, second in pairs)
    for place in range(2):
        assert sorted(pair[place] for pair in pairs) == sorted(
            list(range(pictures)) * min(opponents, pictures - 1)
        )


@pytest.mark.parametrize(
    ("preset", "answer", "cause"),
    [
        ("point", "a good one", "0 numbers"),
        ("point_axes", "Alignment Score (1-5): 3\nStyle Score (1-5): 3", "2 numbers"),
        ("point_axes", AXES.format(3, 3, 3) + "\nStyle Score (1-5): 4", "4 numbers"),
        ("point_axes", AXES.format(3, 6, 3), "gives 6; allowed 1 to 5"),
        ("pair", "Image 1 is better. No: Image 2 is better.", "2 numbers"),
        ("pair", "neither", "0 numbers"),
        ("pair_think", "<think>Image 1 is better</think>", "0 numbers"),
        ("pair_axes", PAIR_AXES.format(*[1.5, -0.5] * 3), "gives 1.5; allowed 0 to 1"),
    ],
)
def test_an_answer_of_another_form_is_never_a_number(
    server: FakeEndpoint, preset: str, answer: str, cause: str
) -> None:
    server.answers = [says(answer)]
    with pytest.raises(ScorerError, match=cause):
        scorer(server, preset).score(PICTURES, ["a fox"] * 4)


def test_options_that_are_given_stand_before_the_presets() -> None:
    given = {"url": "http://localhost/v1", "model": "m"}
    own = parse_options("unified_reward", given | {"preset": "pair", "template": "{prompt}?"})
    assert own.model_dump()["template"] == "{prompt}?"
    assert own.model_dump()["words"] == PRESETS["pair"]["words"]
    assert parse_options("unified_reward", given).model_dump()["max_tokens"] == 512
    with pytest.raises(ValidationError, match="preset"):
        parse_options("unified_reward", given | {"preset": "best"})
