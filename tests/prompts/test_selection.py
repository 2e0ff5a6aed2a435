"""What is kept, and that what is not is counted by its reason."""

import pytest

from g2rpo_ray.prompts.selection import Selection, SelectionError, select

PROMPTS = [
    "a photo of an astronaut riding a horse on mars",
    "A photo of an  astronaut riding a horse on Mars",
    "红色圆圈在绿色三角形的左边，旁边还有一只猫",
    "ein Hund läuft durch den verschneiten Wald bei Nacht",
    "x",
    "a dog " * 200,
]


def test_everything_is_kept_by_default() -> None:
    selected = select(PROMPTS, Selection())
    assert selected.prompts == PROMPTS
    assert selected.left_out == {}


def test_each_option_counts_what_it_leaves_out() -> None:
    selected = select(PROMPTS, Selection(dedup=True, min_characters=3, max_characters=500))
    assert selected.prompts == [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    assert selected.left_out == {"double": 1, "shorter": 1, "longer": 1}


@pytest.mark.parametrize(("languages", "kept"), [(("zh",), [2]), (("en", "de"), [0, 1, 3])])
def test_languages(languages: tuple[str, ...], kept: list[int]) -> None:
    pytest.importorskip("py3langid")
    selected = select(PROMPTS[:4], Selection(languages=languages))
    assert selected.prompts == [PROMPTS[i] for i in kept]
    assert selected.left_out == {"other language": 4 - len(kept)}


def test_an_unknown_language_is_named_with_the_known_ones() -> None:
    pytest.importorskip("py3langid")
    with pytest.raises(SelectionError, match=r"--language english: not known; known are .*\ben\b"):
        select(PROMPTS, Selection(languages=("english",)))


def test_a_limit_takes_evenly_spaced_prompts() -> None:
    numbers = [str(number) for number in range(10)]
    selected = select(numbers, Selection(limit=4))
    assert selected.prompts == ["0", "2", "5", "7"]
    assert selected.left_out == {"over the limit": 6}


def test_nothing_left_says_why() -> None:
    with pytest.raises(SelectionError, match="no prompt of 6 is left: 6 shorter"):
        select(PROMPTS, Selection(min_characters=10_000))
