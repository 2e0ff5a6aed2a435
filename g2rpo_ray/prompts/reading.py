"""Reading prompts: text, JSON lines, parquet, folders of Hugging Face datasets, embeddings."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import read_json_object

MANIFEST = "manifest.json"
"""What a folder of embeddings is known by."""
PROMPTS_FILE = "prompts.parquet"
"""The texts of a folder of embeddings."""
SPLITS = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
    | dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
)
"""Word in the name of a file or folder -> the split it means, as the hub reads them."""


class PromptFileError(InputError):
    """A prompt file cannot be used; the message names file, line or row, key and cause."""


def read_prompts(path: Path, max_characters: int | None, key: str = "prompt") -> list[str]:
    """Read prompts of any script from a file or folder.

    ``.jsonl`` has an object a line and ``.parquet`` a column ``key``; any other file is UTF-8 text,
    a prompt a line. A folder is a Hugging Face dataset (``save_to_disk``, or parquet or JSON lines
    as on the hub), or what ``g2rpo embed`` wrote.

    Args:
        max_characters: a longer prompt is refused; None: any length.
        key: key or column of the text.

    Returns:
        Prompts without surrounding white space, in the order of the file; a prompt's id is its
        place in this list. Empty lines of a text file are passed over.

    Raises:
        PromptFileError: the file is missing, damaged or holds no prompt; a prompt is empty, not
            UTF-8, no text, too long, or has a NUL character.
    """
    if (path / MANIFEST).is_file():
        # Their lengths were judged when they were embedded.
        path, key, max_characters = path / PROMPTS_FILE, "text", None
    prompts = []
    try:
        for place, text in _entries(path, key):
            if "\0" in text:
                raise PromptFileError(f"{place}: holds a NUL character")
            if max_characters is not None and len(text) > max_characters:
                raise PromptFileError(
                    f"{place}: {len(text)} characters; allowed are {max_characters} "
                    "(prompts.max_characters)"
                )
            prompts.append(text)
    except FileNotFoundError:
        raise PromptFileError(f"{path}: no such prompt file") from None
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read: {error}") from error
    if not prompts:
        raise PromptFileError(f"{path}: no prompt in it; expected one prompt a line")
    return prompts


def _entries(path: Path, key: str) -> Iterator[tuple[str, str]]:
    """(place in words, text) of every prompt."""
    if path.is_dir():
        for file in _dataset_files(path):
            yield from _rows(file, key) if file.suffix == ".arrow" else _entries(file, key)
    elif path.suffix == ".jsonl":
        yield from _json_lines(path, key)
    elif path.suffix == ".parquet":
        yield from _rows(path, key)
    else:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not empty."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        place = f"{path}, line {number}"
        try:
            if text := line.decode("utf-8").strip().removeprefix("\ufeff"):
                yield place, text
        except UnicodeDecodeError as error:
            raise PromptFileError(
                f"{place}: not UTF-8 ({error.reason} at byte {error.start}); convert the file to "
                "UTF-8"
            ) from None


def _json_lines(path: Path, key: str) -> Iterator[tuple[str, str]]:
    for place, line in _lines(path):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise PromptFileError(f"{place}: not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise PromptFileError(f"{place}: expected an object with the key {key!r}")
        if key not in entry:
            raise PromptFileError(
                f"{place}: no key {key!r}; it has {', '.join(map(str, entry)) or 'none'} "
                "(prompts.key names the one with the text)"
            )
        yield place, _text(entry[key], f"{place}, key {key!r}")


def _rows(path: Path, key: str) -> Iterator[tuple[str, str]]:
    """Of a parquet file's column (a file may hold pictures, too), or of an Arrow stream's."""
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                names, table = file.schema_arrow.names, file.read(columns=[key])
        else:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
                names, table = stream.schema.names, stream.read_all()
    except pa.ArrowInvalid as error:
        kind = "parquet file" if path.suffix == ".parquet" else "Arrow stream"
        raise PromptFileError(f"{path}: damaged or no {kind}: {error}") from error
    if key not in names:
        raise PromptFileError(
            f"{path}: no column {key!r}; it has {', '.join(names)} (prompts.key names the one with "
            "the text)"
        )
    for number, value in enumerate(table.column(key), start=1):
        place = f"{path}, row {number}"
        yield place, _text(value.as_py(), f"{place}, column {key!r}")


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise PromptFileError(f"{place}: expected a text, found {value!r:.60}")
    text = value.strip()
    if not text:
        raise PromptFileError(f"{place}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair; no tokenizer and no file takes it.
        raise PromptFileError(f"{place}: no Unicode text: {error.reason}, {value!r:.60}") from None
    return text


def _dataset_files(folder: Path) -> list[Path]:
    """Data files of a Hugging Face dataset's folder, in order."""
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
    parquet, lines = (sorted(folder.rglob(f"*.{suffix}")) for suffix in ("parquet", "jsonl"))
    first_of: dict[str, Path] = {}
    for file in (path.relative_to(folder) for path in parquet + lines):
        if (split := _split_of(file)) is not None:
            first_of.setdefault(split, file)
    if len(first_of) > 1:
        found = ", ".join(f"{split} ({file})" for split, file in sorted(first_of.items()))
        raise PromptFileError(
            f"{folder}: files of the splits {found}; name one file, or a folder with one split"
        )
    if parquet or lines:
        return parquet or lines
    raise PromptFileError(
        f"{folder}: cannot be read as prompts: no state.json (datasets' save_to_disk), no .parquet "
        f"or .jsonl file, and no {MANIFEST} (g2rpo embed)"
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
