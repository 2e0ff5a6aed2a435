"""Which prompt a picture of a folder was made for: by its file's name, a number in it, or place."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from g2rpo_ray.common.files import cause_of, name_text
from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.evaluation.scoring.pictures import Found, Picture, ScoreError

FILE_KEYS = ("file_name", "file", "image")
"""Of a prompt's metadata: the picture that it belongs to, relative to the folder; the first is what
Hugging Face's imagefolder takes, the second what ``g2rpo evaluate`` writes."""
SHOWN = 5

Caption = tuple[str | None, str]
"""A picture's text, or why it has none."""


def folder_pictures(
    found: Found, prompts: Sequence[str] | None, tell: Callable[[str], None]
) -> Iterator[Picture]:
    """Every picture of a folder with its text.

    Args:
        prompts: None: each picture's text is in a ``.txt`` file of its name, if there is one.
        tell: told how they were brought together, and of captions without a picture.

    Raises:
        ScoreError: which belong together cannot be known.
    """
    caption_of = partial(_beside, found.folder) if prompts is None else _pairs(found, prompts, tell)
    for name in found.images:
        file = found.folder / name
        try:
            found_as = file.stat()
            content = f"{found_as.st_size} {found_as.st_mtime_ns}"
        except OSError:
            # Gone since it was found: reading it says so.
            content = "gone"
        prompt, no_prompt = caption_of(name)
        yield Picture(name_text(name), prompt, content, file.read_bytes, no_prompt)


def _beside(folder: Path, name: str) -> Caption:
    file = (folder / name).with_suffix(".txt")
    try:
        return (file.read_text(encoding="utf-8").strip() if file.is_file() else None), ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{name_text(file.name)} cannot be read: {cause_of(error, file)}"


def _pairs(
    found: Found, prompts: Sequence[str], tell: Callable[[str], None]
) -> Callable[[str], Caption]:
    key = next((key for key in FILE_KEYS if any(key in metadata_of(p) for p in prompts)), None)
    if key is not None:
        how, captions, lonely = _by_file(found, prompts, key)
    elif any(_number(name) is not None for name in found.images):
        how, captions, lonely = _by_number(found, prompts)
    elif len(prompts) == len(found.images):
        how, lonely = "in the order of the pictures' names", list[str]()
        captions = {name: (text, "") for name, text in zip(found.images, prompts, strict=True)}
    else:
        raise ScoreError(
            f"{len(found.images)} pictures and {len(prompts)} prompts, and nothing that says which "
            f"belong together: give each prompt a {FILE_KEYS[0]} (a column, or a key of its "
            "object), or begin the pictures' names with the prompt's number, from 0 (0_3.png)"
        )
    tell(f"{len(prompts)} prompts to {len(found.images)} pictures: {how}")
    if lonely:
        shown = ", ".join(lonely[:SHOWN]) + (", ..." if len(lonely) > SHOWN else "")
        tell(f"{len(lonely)} prompts have no picture: {shown}")
    return lambda name: captions.get(name, (None, "no prompt belongs to it"))


Pairs = tuple[str, dict[str, Caption], list[str]]
"""How, in words; captions by picture; prompts without one."""


def _by_file(found: Found, prompts: Sequence[str], key: str) -> Pairs:
    places, lonely = defaultdict[str, list[str]](list), list[str]()
    for name in found.images:
        places[PurePosixPath(name).name].append(name)
    texts, captions = defaultdict[str, list[str]](list), dict[str, Caption]()
    for prompt in prompts:
        told = str(metadata_of(prompt).get(key, "")).removeprefix(f"{found.folder}/")
        alike = places.get(PurePosixPath(told).name, [])
        if told in alike or len(alike) == 1:
            texts[told if told in alike else alike[0]].append(prompt)
        elif alike:
            why = f"{len(alike)} pictures have this name; {key} must tell its folder, too"
            captions |= dict.fromkeys(alike, (None, why))
        else:
            lonely.append(told or repr(prompt[:40]))
    for name, found_for in texts.items():
        one = len(set(found_for)) == 1
        two = "it has several prompts: " + ", ".join(f"{text!r:.60}" for text in found_for[:2])
        captions[name] = (found_for[0], "") if one else (None, two)
    return f"by {key}", captions, lonely


def _by_number(found: Found, prompts: Sequence[str]) -> Pairs:
    numbers = {name: _number(name) for name in found.images}
    known = {number for number in numbers.values() if number is not None}
    if min(known) > 0 and max(known) == len(prompts):
        raise ScoreError(
            f"pictures are numbered from {min(known)} to {max(known)}, and {len(prompts)} prompts "
            f"from 0 to {len(prompts) - 1}: rename the pictures, or give each prompt a "
            f"{FILE_KEYS[0]}"
        )
    captions: dict[str, Caption] = {
        name: (prompts[number], "")
        for name, number in numbers.items()
        if number is not None and number < len(prompts)
    }
    lonely = [f"number {number}" for number in range(len(prompts)) if number not in known]
    return "by the number that names begin with", captions, lonely


def _number(name: str) -> int | None:
    """Of the prompt: ``7`` of 7.png, 7_3.png, 00007/samples/0003.png."""
    path = PurePosixPath(name)
    for part in (*path.parts[:-1], path.stem):
        if match := re.fullmatch(r"(\d+)(_\d+)?", part):
            return int(match[1])
    return None
