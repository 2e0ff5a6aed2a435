"""GenEval's checks on made-up detections, and metadata that are not as its jsonl has them."""

from collections.abc import Sequence
from typing import Any

import pytest

from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.scorers.composition_checks import Box, checks, read_composition, relations


@pytest.mark.parametrize(
    ("box", "other", "expected"),
    [
        ((0, 0, 10, 10), (50, 0, 60, 10), {"left of"}),
        ((50, 0, 60, 10), (0, 0, 10, 10), {"right of"}),
        ((0, 0, 10, 10), (0, 50, 10, 60), {"above"}),
        ((0, 50, 10, 60), (0, 0, 10, 10), {"below"}),
        ((0, 0, 10, 10), (50, 50, 60, 60), {"left of", "above"}),
        ((50, 50, 60, 60), (0, 0, 10, 10), {"right of", "below"}),
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),
        # The threshold is a tenth of both widths: 2 of two boxes of 10.
        ((2, 0, 12, 10), (0, 0, 10, 10), set()),
        # Beyond it, by 1 of an offset of 3: a third is less than the half that makes a relation.
        ((3, 0, 13, 10), (0, 0, 10, 10), set()),
        ((4, 0, 14, 10), (0, 0, 10, 10), set()),
        ((4.1, 0, 14.1, 10), (0, 0, 10, 10), {"right of"}),
        # Of sizes: wide boxes need a wide offset.
        ((40, 0, 240, 10), (0, 0, 200, 10), set()),
        ((90, 0, 290, 10), (0, 0, 200, 10), {"right of"}),
        # Mostly above: to the left by too little of the offset.
        ((0, 0, 10, 10), (20, 100, 30, 110), {"above"}),
    ],
)
def test_relations_of_boxes(box: Box, other: Box, expected: set[str]) -> None:
    assert relations(box, other) == expected


LEFT, RIGHT, TOP = (0.0, 40.0, 10.0, 50.0), (80.0, 40.0, 90.0, 50.0), (40.0, 0.0, 50.0, 10.0)
CAT, TWO_CATS = {"cat": [LEFT]}, {"cat": [LEFT, RIGHT]}


def found(metadata: dict[str, Any], objects: dict[str, Any], colours: Sequence[str] = ()) -> Any:
    asked = iter(colours)
    results = checks(read_composition(PromptText("a prompt", metadata)), objects, asked)
    assert not list(asked)
    return results


def clause(name: str, count: int = 1, **more: object) -> dict[str, Any]:
    return {"class": name, "count": count} | more


@pytest.mark.parametrize(
    ("metadata", "objects", "colours", "expected"),
    [
        # single_object, two_object
        ({"include": [clause("cat")]}, CAT, [], [1]),
        ({"include": [clause("cat")]}, TWO_CATS, [], [1]),
        ({"include": [clause("cat")]}, {"dog": [LEFT]}, [], [0]),
        ({"include": [clause("cat"), clause("dog")]}, CAT, [], [1, 0]),
        # counting
        ({"include": [clause("cat", 2)], "exclude": [clause("cat", 3)]}, TWO_CATS, [], [1]),
        ({"include": [clause("cat", 2)], "exclude": [clause("cat", 3)]}, CAT, [], [0.5]),
        ({"include": [clause("cat", 2)], "exclude": [clause("cat", 3)]}, {"cat": [LEFT] * 3}, [],
         [0.5]),
        ({"include": [clause("cat", 2)], "exclude": [clause("cat", 3)]}, {"cat": [LEFT] * 9}, [],
         [0]),
        ({"include": [clause("cat", 2)], "exclude": [clause("cat", 3), clause("cat", 5)]},
         {"cat": [LEFT] * 3}, [], [0.5]),
        # colors, color_attr
        ({"include": [clause("cat", color="red")]}, CAT, ["red"], [1, 1]),
        ({"include": [clause("cat", color="red")]}, CAT, ["blue"], [1, 0]),
        ({"include": [clause("cat", color="red")]}, {}, [], [0, 0]),
        ({"include": [clause("cat", 2, color="red")]}, TWO_CATS, ["red", "blue"], [1, 0.5]),
        ({"include": [clause("cat", color="red"), clause("dog", color="blue")]},
         {"cat": [LEFT], "dog": [RIGHT]}, ["red", "red"], [1, 1, 1, 0]),
        # Only the most confident object's colour counts.
        ({"include": [clause("cat", color="red")]}, TWO_CATS, ["red"], [1, 1]),
        # position
        ({"include": [clause("dog"), clause("cat", position=["left of", 0])]},
         {"cat": [LEFT], "dog": [RIGHT]}, [], [1, 1, 1]),
        ({"include": [clause("dog"), clause("cat", position=["right of", 0])]},
         {"cat": [LEFT], "dog": [RIGHT]}, [], [1, 1, 0]),
        ({"include": [clause("dog"), clause("cat", position=["left of", 0])]}, CAT, [], [0, 1, 0]),
        ({"include": [clause("dog"), clause("cat", 2, position=["left of", 0])]},
         {"cat": [LEFT, RIGHT], "dog": [TOP]}, [], [1, 1, 0.5]),
        # exclude alone
        ({"exclude": [clause("cat")]}, CAT, [], [0]),
        ({"exclude": [clause("cat", 2)]}, CAT, [], [1]),
        ({"include": [clause("dog")], "exclude": [clause("cat")]}, CAT, [], [0, 0]),
    ],
)  # fmt: skip
def test_each_kind_of_check(
    metadata: dict[str, Any], objects: dict[str, Any], colours: list[str], expected: list[float]
) -> None:
    assert found(metadata, objects, colours) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metadata", "cause"),
    [
        ({}, "neither include nor exclude says what to look for"),
        ({"tag": "colors"}, "neither include nor exclude"),
        ({"include": "cat"}, "include: Input should be a valid list"),
        ({"include": [{"count": 1}]}, "include.0.class: missing"),
        ({"include": [clause("")]}, "include.0.class"),
        ({"include": [clause("cat", 0)]}, "include.0.count"),
        ({"include": [clause("cat", color="teal")]}, "include.0.color: Input should be 'red', 'or"),
        ({"include": [clause("cat", size="big")]}, "include.0.size: unknown key"),
        ({"include": [clause("cat", position=["left of", 0])]}, "0 is no place of a clause before"),
        (
            {"include": [clause("a"), clause("b", position=["near", 0])]},
            "'near'; known are left of",
        ),
        ({"include": [clause("a"), clause("b", position=["above"])]}, "include.1.position"),
    ],
)
def test_metadata_that_say_no_composition(metadata: dict[str, Any], cause: str) -> None:
    with pytest.raises(ScorerError) as caught:
        read_composition(PromptText("a photo", metadata))
    assert str(caught.value).startswith("prompt 'a photo': its metadata are not as GenEval's: ")
    assert cause in str(caught.value)


def test_a_plain_text_has_no_metadata() -> None:
    with pytest.raises(ScorerError, match="neither include nor exclude"):
        read_composition("a photo of two cats")
