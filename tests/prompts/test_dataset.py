"""Prompt files of every kind, and the order in which training sees them."""

from collections import Counter
from pathlib import Path

import pytest

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.prompts.dataset import PromptOrder
from g2rpo_ray.prompts.formats import PromptFileError
from g2rpo_ray.prompts.reading import read_prompts

LIMIT = 2000


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error_of(path: Path) -> str:
    with pytest.raises(PromptFileError) as caught:
        read_prompts(path, LIMIT)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    assert "no such prompt file" in error_of(tmp_path / "prompts.txt")


def test_folder(tmp_path: Path) -> None:
    assert "cannot be read" in error_of(tmp_path)


@pytest.mark.parametrize("content", ["", "\n\n", "  \n\t\r\n", "\ufeff\n"])
def test_no_prompt_in_the_file(tmp_path: Path, content: str) -> None:
    message = error_of(write(tmp_path / "prompts.txt", content))
    assert "no prompt in it; expected one prompt a line" in message


def test_empty_lines_are_passed_over_and_ids_count_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.txt", "\n\na cat\n   \n\n\ta dog  \n\n")
    assert read_prompts(path, LIMIT) == ["a cat", "a dog"]


def test_line_ends_and_byte_order_mark_of_other_systems(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.txt", "\ufeffa cat\r\na dog\r\nno line end")
    assert read_prompts(path, LIMIT) == ["a cat", "a dog", "no line end"]


def test_any_script_and_emoji_are_welcome(tmp_path: Path) -> None:
    prompts = [
        "红色圆圈在左边",
        "قطة على سطح المنزل",
        "дом у моря",
        "a 🐈‍⬛ on a 🪑",
        "e\u0301te\u0301",
    ]
    path = write(tmp_path / "prompts.txt", "\n".join(prompts))
    assert read_prompts(path, LIMIT) == prompts


def test_a_line_separator_of_unicode_ends_no_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.txt", "a cat\u2028on a mat\n")
    assert read_prompts(path, LIMIT) == ["a cat\u2028on a mat"]


def test_a_long_line_is_named_with_its_length_and_the_limit(tmp_path: Path) -> None:
    message = error_of(write(tmp_path / "prompts.txt", "a cat\n\n" + "x" * 5000 + "\n"))
    assert "line 3: 5000 characters; allowed are 2000 (prompts.max_characters)" in message


def test_the_limit_counts_characters_and_is_itself_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.txt", "猫" * LIMIT)
    assert read_prompts(path, LIMIT) == ["猫" * LIMIT]


@pytest.mark.parametrize("broken", [b"\xff\xfe", b"caf\xe9", b"\xe7\x8c", b"\xed\xa0\x80"])
def test_broken_utf8_is_named_with_its_line(tmp_path: Path, broken: bytes) -> None:
    message = error_of(write(tmp_path / "prompts.txt", b"a cat\n" + broken + b"\na dog\n"))
    assert "line 2: not UTF-8" in message
    assert "convert the file to UTF-8" in message


def test_nul_character_is_named_with_its_line(tmp_path: Path) -> None:
    assert "line 2: holds a NUL" in error_of(write(tmp_path / "prompts.txt", "a cat\na \0 dog\n"))


def test_the_tiny_worlds_prompts_do_not_overlap() -> None:
    train, heldout = (
        read_prompts(resolve_path(f"tiny_world:prompts/{name}.txt"), LIMIT)
        for name in ("train", "heldout")
    )
    assert len(set(train)) == len(train) > len(heldout) == len(set(heldout))
    assert set(train).isdisjoint(heldout)


def ids_of(order: PromptOrder, iterations: range) -> list[int]:
    return [prompt_id for iteration in iterations for prompt_id in order.batch(iteration)]


@pytest.mark.parametrize(("count", "batch"), [(10, 4), (7, 7), (3, 8), (1, 2), (12, 5)])
def test_every_prompt_once_per_epoch_across_its_borders(count: int, batch: int) -> None:
    epochs = 3 * batch
    ids = ids_of(PromptOrder(count, 0, batch), range(epochs * count // batch))
    for first in range(0, len(ids), count):
        assert sorted(ids[first : first + count]) == list(range(count))
    assert Counter(ids) == dict.fromkeys(range(count), epochs)


def test_the_order_is_a_function_of_seed_and_iteration() -> None:
    order = PromptOrder(50, 3, 8)
    forwards = [order.batch(iteration) for iteration in range(20)]
    backwards = [PromptOrder(50, 3, 8).batch(iteration) for iteration in reversed(range(20))]
    assert forwards == backwards[::-1]


def test_seeds_and_epochs_are_shuffled_differently() -> None:
    first, second = PromptOrder(50, 0, 50), PromptOrder(50, 1, 50)
    orders = [first.batch(0), first.batch(1), second.batch(0), list(range(50))]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_of_prompts_does_not_depend_on_the_batch() -> None:
    assert ids_of(PromptOrder(9, 5, 4), range(9)) == ids_of(PromptOrder(9, 5, 6), range(6))
