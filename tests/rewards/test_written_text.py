"""The text a prompt asks for, and how near a reading of a picture comes to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.scorers.written_text import (
    comparable,
    edit_distance,
    similarity,
    wanted_texts,
)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a sign that says "OPEN 24h"', ["OPEN 24h"]),
        ("two signs, “Left” and „Rechts“", ["Left", "Rechts"]),
        ('a neon "欢迎" above «sortie» and 「出口」', ["欢迎", "sortie", "出口"]),
        ("the dog's bowl, with \"Rex's\" on it", ["Rex's"]),
        ('an empty "" and a full "x"', ["x"]),
        ('"a „b" c', ["a „b"]),
    ],
)
def test_texts_stand_in_double_quotes(prompt: str, texts: list[str]) -> None:
    assert wanted_texts(prompt, None) == texts


@pytest.mark.parametrize(("value", "texts"), [("SALE", ["SALE"]), (["A", "B"], ["A", "B"])])
def test_texts_of_the_prompt_file(value: object, texts: list[str]) -> None:
    assert wanted_texts(PromptText('a "shop"', {"text": value}), "text") == texts


@pytest.mark.parametrize(
    ("prompt", "field", "cause"),
    [
        ("a red fox", None, "'a red fox': no text in double quotes"),
        ('a sign ""', None, "no text in double quotes"),
        ('a sign " "', None, "no text in double quotes"),
        ('say "hi', None, "the quote that opens at character 5, '\"hi', does not close with \""),
        ('say „hi"', None, "does not close with “ or ”"),
        ('a 5" board with "HI"', None, "character 20"),
        ('a sign "ثعلب"', None, "'ثعلب' runs from right to left"),
        ('a sign "שלום"', None, "runs from right to left"),
        ('a "sign"', "text", "no 'text' in its metadata (there: nothing)"),
        (PromptText("a sign", {"tag": 1}), "text", "(there: 'tag')"),
        (PromptText("a sign", {"text": 7}), "text", "'text' is 7; expected a text or a list"),
        (PromptText("a sign", {"text": [""]}), "text", "no text under 'text'"),
    ],
)
def test_a_prompt_without_a_text_that_can_be_read(
    prompt: str, field: str | None, cause: str
) -> None:
    with pytest.raises(ScorerError) as caught:
        wanted_texts(prompt, field)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "lines", "score"),
    [
        # Flow-GRPO: all that was read as one string, compared in lower case without blanks.
        (["Hello World"], ["hello", "WORLD"], 1.0),
        (["hello"], ["shop", "hello", "2026"], 1.0),
        (["hello"], ["hallo"], 0.8),
        (["hello"], ["hello"[:3]], 0.6),
        (["hello"], ["hallox"], 0.6),
        (["hello"], [], 0.0),
        (["hello"], ["a quite long other text"], 0.0),
        (["don’t"], ["don't"], 1.0),
        (["ＡＢ"], ["ab"], 1.0),
        # Several: in any order, each counted by its length.
        (["left", "right"], ["right", "left"], 1.0),
        (["open", "opening"], ["opening", "open"], 1.0),
        (["sale", "sale"], ["sale"], 0.5),
        (["sale", "sale"], ["sale", "sale"], 1.0),
        (["open", "closed"], ["opem", "closed"], 0.9),
        (["abcd", "efgh"], ["efgx", "abcx"], 0.75),
        (["abcd", "efgh"], ["abcd"], 0.5),
        # "cd" taken out of "abcdef" leaves two pieces, in which "be" does not stand.
        (["cd", "be"], ["abcdef"], 0.5),
    ],
)
def test_the_score_of_a_reading(texts: list[str], lines: list[str], score: float) -> None:
    wanted, read = [*map(comparable, texts)], [*map(comparable, lines)]
    assert similarity(wanted, read) == pytest.approx(score)


def test_many_texts_are_compared_in_the_order_of_the_prompt() -> None:
    texts = ["one", "two", "three", "four", "five", "six"]
    read = ["onx", "twx", "threx", "foux", "fivx", "six"]
    assert similarity(texts, read) == pytest.approx(1 - 5 / 22)


def _plain_distance(first: str, second: str) -> int:
    if not first or not second:
        return len(first) + len(second)
    kept = _plain_distance(first[1:], second[1:])
    if first[0] == second[0]:
        return kept
    return 1 + min(kept, _plain_distance(first[1:], second), _plain_distance(first, second[1:]))


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_is_levenshteins(first: str, second: str) -> None:
    assert edit_distance(first, second) == _plain_distance(first, second)
    assert edit_distance("kitten", "sitting") == 3


@given(
    st.lists(st.text("ab ", min_size=1, max_size=8).filter(str.strip), min_size=1, max_size=5),
    st.lists(st.text("ab ", max_size=8), max_size=4),
)
def test_scores_stay_between_0_and_1(texts: list[str], lines: list[str]) -> None:
    wanted, read = [*map(comparable, texts)], [*map(comparable, lines)]
    assert 0 <= similarity(wanted, read) <= 1
    assert similarity(wanted, [*reversed(wanted)]) <= 1
