"""Reading prompts: of a file, of a folder of a Hugging Face dataset, of one of embeddings."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from g2rpo_ray.common.files import cause_of, files_under, name_text, read_json_object
from g2rpo_ray.common.prompt_text import PromptText, metadata_of
from g2rpo_ray.prompts.formats import JSON_SUFFIXES, TABLE_SUFFIXES, PromptFileError, file_prompts

MANIFEST = "manifest.json"
"""What a folder of embeddings is known by."""
UNFINISHED = "plan.json"
"""In one that is not whole: what it is to hold."""
PROMPTS_FILE = "prompts.parquet"
"""The texts of a folder of embeddings."""
METADATA = "metadata"
"""Its column of what else the prompt file said, as JSON; earlier versions wrote none."""
SPLITS = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
    | dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
)
"""Word in the name of a file or folder -> the split it means, as the hub reads them."""
KINDS = ((".parquet",), JSON_SUFFIXES, TABLE_SUFFIXES, (".txt",))
"""Data files of a folder: those of the first kind that it has."""
NO_DATA = ("dataset_info", "dataset_infos", "config", "readme", "license", "requirements")
"""Files of these names lie beside them."""

MOST_FILES = 100_000
"""Of a folder of prompts; one with more is ``/``, or somebody's home."""


def read_prompts(path: Path, max_characters: int | None, key: str | int = "prompt") -> list[str]:
    """Read prompts of any script from a file or folder.

    A file is read as what it holds, whatever its name: JSON (lines, a list of texts or of objects,
    an object with lists), a table with commas, semicolons or tabs, parquet, Arrow; else UTF-8 text,
    a prompt a line. A folder is a Hugging Face dataset (``save_to_disk``, or data files as on the
    hub), or what ``g2rpo embed`` wrote.

    Args:
        max_characters: a longer prompt is refused; None: any length.
        key: key or column of the text; a number is a column, from 1, of a table without names.

    Returns:
        Prompts without surrounding white space, in the order of the file; a prompt's id is its
        place in this list. Empty lines of a text file are passed over. What a file has beside
        the text (other keys or columns, the style of a list) are a prompt's metadata.

    Raises:
        PromptFileError: the file is missing, damaged, not understood or holds no prompt; a prompt
            is empty, not UTF-8, no text, too long, or has a NUL character.
    """
    embedded = (path / MANIFEST).is_file()
    if embedded:
        # Their lengths were judged when they were embedded.
        path, key, max_characters = path / PROMPTS_FILE, "text", None
    prompts: list[str] = []
    try:
        for place, text in _entries(path, key):
            if "\0" in text:
                raise PromptFileError(f"{place}: holds a NUL character")
            if max_characters is not None and len(text) > max_characters:
                raise PromptFileError(
                    f"{place}: {len(text)} characters; allowed are {max_characters} "
                    "(prompts.max_characters)"
                )
            if embedded:
                text = PromptText(text, json.loads(metadata_of(text).get(METADATA, "{}")))
            prompts.append(text)
    except FileNotFoundError:
        raise PromptFileError(f"{path}: no such prompt file") from None
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read: {cause_of(error, path)}") from error
    if not prompts:
        raise PromptFileError(f"{path}: no prompt in it; expected one prompt a line")
    return prompts


def _entries(path: Path, key: str | int) -> Iterator[tuple[str, PromptText]]:
    """(place in words, text) of every prompt."""
    if not path.is_dir():
        yield from file_prompts(path, key)
        return
    files = _dataset_files(path)
    for file in files:
        # A file for each style, as in HPDv2's benchmark: lists of texts that say no more.
        of_style = (
            len(files) > 1 and file.suffix.lower() == ".json" and not _split_of(Path(file.name))
        )
        for place, text in file_prompts(file, key):
            styled = of_style and not metadata_of(text)
            yield place, PromptText(text, {"style": name_text(file.stem)}) if styled else text


def _dataset_files(folder: Path) -> list[Path]:
    """Data files of a Hugging Face dataset's folder, in order."""
    if (folder / UNFINISHED).is_file() and not (folder / MANIFEST).is_file():
        raise PromptFileError(
            f"{folder}: embeddings that were not finished ({UNFINISHED}, no {MANIFEST}); the same "
            "g2rpo embed command goes on where it stopped"
        )
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = read_json_object(splits, PromptFileError).get("splits", [])
        raise PromptFileError(
            f"{folder}: a dataset of the splits {', '.join(names)}; name one of its folders, such "
            f"as {folder / (names or ['train'])[0]}"
        )
    state = folder / "state.json"
    if state.is_file():
        return _named_files(state)
    if folder == Path(folder.anchor):
        raise PromptFileError(
            f"{folder}: the root of a file system is no folder of prompts; name one in it"
        )
    names = files_under(folder, MOST_FILES)
    if len(names) > MOST_FILES:
        raise PromptFileError(
            f"{folder}: cannot be read as prompts: more than {MOST_FILES} files lie in it and below"
            "; name one of them, or the folder of one dataset"
        )
    names = [name for name in names if name.stem.lower() not in NO_DATA]
    of_kinds = [[name for name in names if name.suffix.lower() in kind] for kind in KINDS]
    chosen = next(filter(None, of_kinds), [])
    first_of: dict[str, Path] = {}
    for file in [name for kind in of_kinds[:-1] for name in kind] or chosen:
        if (split := _split_of(file)) is not None:
            first_of.setdefault(split, file)
    if len(first_of) > 1:
        found = ", ".join(f"{split} ({file})" for split, file in sorted(first_of.items()))
        raise PromptFileError(
            f"{folder}: files of the splits {found}; name one file, or a folder with one split"
        )
    if chosen:
        return [folder / name for name in chosen]
    suffixes = ", ".join(suffix for kind in KINDS for suffix in kind)
    raise PromptFileError(
        f"{folder}: cannot be read as prompts: no state.json (datasets' save_to_disk), no file "
        f"that ends in {suffixes}, and no {MANIFEST} (g2rpo embed)"
    )


def _named_files(state: Path) -> list[Path]:
    """The files that a dataset's state.json lists."""
    entries = read_json_object(state, PromptFileError).get("_data_files", [])
    try:
        files = [state.parent / entry["filename"] for entry in entries]
    except (TypeError, KeyError) as error:
        raise PromptFileError(
            f"{state}: _data_files is {entries!r:.60}; expected a list of {{'filename': ...}}, as "
            "datasets' save_to_disk writes it"
        ) from error
    for file in files:
        if not file.is_file():
            raise PromptFileError(f"{file}: missing; {state} names it")
    return files


def _split_of(path: Path) -> str | None:
    """By a word of the file's name, else of a folder's: ``test-0.jsonl``, ``test/0000.parquet``.

    Args:
        path: relative to the dataset's folder.

    Returns:
        None where no name says it.
    """
    for part in (path.stem, *reversed(path.parts[:-1])):
        for word in re.findall("[^\\W_]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    # A split may have any name in the hub's layout: NAME-00000-of-00003.parquet.
    return path.name.split("-")[0] if "-of-" in path.name else None
