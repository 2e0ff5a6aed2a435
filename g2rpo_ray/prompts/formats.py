"""The prompts of one file: plain lines, JSON, a table, parquet or Arrow, told apart by content."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.prompt_text import PromptText, is_blank

JSON_SUFFIXES, TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv")
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_OTHERS = {
    b"pk\x03\x04": "it is a zip file or a spreadsheet: unpack it, or save it as CSV",
    b"\x1f\x8b": "it is compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd: unpack it",
    b"version https://git-lfs": "it is Git LFS's pointer to the file: 'git lfs pull' fetches that",
    b"<!": "it is a web page, or XML",
    b"<?xml": "it is XML",
    b"<html": "it is a web page",
}
"""What a file begins with, in small letters -> why it holds no prompts."""
_JSON_START = re.compile(r"""[\[{]\s*(["'\[\]{}]|$)""")
"""``["a cat"]`` is no prompt, ``[cinematic] a cat`` is one."""
_ONLY_MARKS = re.compile(r"""[\[\]{}"',:\s]*$""")
_BLANK = "\ufeff \n\t"
SHOWN_LINES = 3


class PromptFileError(InputError):
    """A prompt file cannot be used; the message names file, line or row, key and cause."""


def file_prompts(path: Path, key: str | int) -> Iterator[tuple[str, PromptText]]:
    """(place in words, text) of every prompt of a file, in its order; see ``read_prompts``."""
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        start = file.read(len(_ARROW_FILE))
        columnar = suffix in (".parquet", ".arrow") or start.startswith(
            (_PARQUET, _ARROW_FILE, _ARROW_STREAM)
        )
        text = "" if columnar else _decoded(path, start + file.read())
    if columnar:
        yield from _column(path, start, str(key))
    elif suffix in JSON_SUFFIXES or _JSON_START.match(text.lstrip(_BLANK)):
        yield from _json(path, text, str(key))
    elif delimiter := _delimiter(text, suffix, str(key)):
        yield from _table(path, text, delimiter, key)
    else:
        yield from _lines(path, text, str(key))


def _column(path: Path, start: bytes, key: str) -> Iterator[tuple[str, PromptText]]:
    """Of a parquet file (it may hold pictures, too), or of an Arrow file or stream."""
    number = 0
    try:
        for name, part in _parts(path, start, key):
            # What Python reads of a damaged one unchecked may end the process.
            part.validate(full=True)
            for row in part.to_pylist():
                number += 1
                place = f"{path}, row {number}"
                text = _text(row.pop(name), f"{place}, column {name!r}")
                yield place, PromptText(text, row)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path}: damaged, after row {number}: {error}") from error


def _parts(path: Path, start: bytes, key: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The column's name with rows of it and of the plain ones beside it, part after part."""
    if start.startswith(_PARQUET) or path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as file:
            name, columns = _columns(file.schema_arrow, key, f"{path}")
            for batch in file.iter_batches(columns=columns):
                yield name, batch
        return
    # No memory map: a damaged file would end the process.
    with pa.OSFile(str(path)) as source:
        if start == _ARROW_FILE:
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = pa.ipc.open_stream(source)
        name, columns = _columns(reader.schema, key, f"{path}")
        for batch in batches:
            yield name, batch.select(columns)


def _columns(schema: pa.Schema, key: str, place: str) -> tuple[str, list[str]]:
    """The column with the text; and it and all that can be metadata, of which pictures cannot."""
    name = _named(schema.names, key, place, "column")
    single = [field for field in schema if schema.names.count(field.name) == 1]
    return name, [field.name for field in single if field.name == name or _is_plain(field.type)]


def _is_plain(kind: pa.DataType) -> bool:
    if kind.num_fields:
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
    texts = pa.types.is_string, pa.types.is_large_string
    return any(is_one(kind) for is_one in (*tests, *texts))


def _decoded(path: Path, content: bytes) -> str:
    """Its text, each line ended by a line feed alone."""
    for start, reason in _OTHERS.items():
        if content[:64].lstrip().lower().startswith(start):
            raise PromptFileError(f"{path}: cannot be read as prompts: {reason}")
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    zeros = [content[place::2].count(0) for place in (0, 1)]
    if not utf16 and max(zeros) > len(content) / 4 > 4 * min(zeros):
        raise PromptFileError(
            f"{path}: every other byte is 0, as in UTF-16 without its mark; convert the file to "
            "UTF-8"
        )
    try:
        return re.sub("\r\n?", "\n", content.decode("utf-16" if utf16 else "utf-8"))
    except UnicodeDecodeError as error:
        *lines, line = content[: error.start].split(b"\n")
        form = "UTF-16, whose mark it begins with" if utf16 else "UTF-8"
        raise PromptFileError(
            f"{path}, line {len(lines) + 1}: not {form} ({error.reason} at byte {len(line)}); "
            "convert the file to UTF-8"
        ) from None


def _json(path: Path, text: str, key: str) -> Iterator[tuple[str, PromptText]]:
    """Documents one after the other, such as a line each; or one that has them all."""
    documents: list[tuple[str, Any, dict[str, Any]]]
    documents = [(place, entry, {}) for place, entry in _documents(path, text)]
    if len(documents) == 1:
        documents = _listed(path, documents[0][1], key) or documents
    for place, entry, metadata in documents:
        yield place, _entry(entry, place, key, metadata)


def _listed(path: Path, whole: Any, key: str) -> list[tuple[str, Any, dict[str, Any]]]:
    """(place, entry, metadata) of a document that is a list of them, or has a list for each style,
    as HPDv2, or for each column; empty where it is none of that."""
    lists = whole if isinstance(whole, dict) else {"": whole}
    columns = {}
    if isinstance(lists.get(key), list):
        count = len(lists[key])
        columns = {n: c for n, c in lists.items() if isinstance(c, list) and len(c) == count}
        lists = {key: columns.pop(key)}
    if not all(isinstance(entries, list) for entries in lists.values()):
        return []
    return [
        (
            f"{path}, {f'{name!r}, ' * bool(name)}entry {number}",
            entry,
            {"style": name}
            if name not in ("", key)
            else {n: column[number - 1] for n, column in columns.items()},
        )
        for name, entries in lists.items()
        for number, entry in enumerate(entries, start=1)
    ]


def _documents(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """(place of its beginning, content) of each JSON document."""
    decoder, blank, end, line = json.JSONDecoder(), re.compile(f"[{_BLANK}]*"), 0, 1
    while match := blank.match(text, end):
        start, last = match.end(), end
        line += text.count("\n", last, start)
        if start == len(text):
            return
        try:
            content, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise _not_understood(
                f"{path}, line {error.lineno}: not JSON: {error.msg}", text
            ) from None
        # A number of more digits than Python reads.
        except ValueError as error:
            found = f"{path}, from line {line} on: a number of too many digits: {error}"
            raise _not_understood(found, text) from None
        except RecursionError:
            raise _not_understood(f"{path}, line {line}: JSON nested too deep", text) from None
        yield f"{path}, line {line}", content
        line += text.count("\n", start, end)


def _entry(entry: object, place: str, key: str, metadata: dict[str, Any]) -> PromptText:
    if isinstance(entry, str):
        return PromptText(_text(entry, place), metadata)
    if not isinstance(entry, dict):
        raise PromptFileError(
            f"{place}: expected an object with the key {key!r}, or a text; found {entry!r:.60}"
        )
    name = _named(entry, key, place, "key")
    beside = {other: value for other, value in entry.items() if other != name}
    return PromptText(_text(entry[name], f"{place}, key {name!r}"), metadata | beside)


def _delimiter(text: str, suffix: str, key: str) -> str:
    """What parts the cells of a table's rows; empty where the file is none."""
    lines = [line.strip(_BLANK) for line in text.split("\n") if line.strip(_BLANK)]
    for delimiter in "\t,;":
        names = _cells(lines[:1], delimiter)
        if len(names) > 1 and key.lower() in [name.lower() for name in names]:
            return delimiter
    tabs = {line.count("\t") for line in lines}
    if lines and (suffix == ".tsv" or (len(tabs) == 1 and tabs != {0})):
        return "\t"
    if lines and suffix == ".csv":
        return max(",;", key=lines[0].count)
    quoted = all(line[0] == line[-1] == '"' and len(_cells([line], ",")) == 1 for line in lines)
    return "," if lines and quoted else ""


def _table(
    path: Path, text: str, delimiter: str, key: str | int
) -> Iterator[tuple[str, PromptText]]:
    """A column by its name in the first row, or where no row has names by its number; metadata are
    the other columns, which are not empty, by their names."""
    rows, titles = _rows(path, text, delimiter), list[str]()
    names = rows[0][1] if rows else [""]
    if str(key).lower() in [name.lower() for name in names]:
        column, rows = names.index(_named(names, str(key), f"{path}", "column")), rows[1:]
        titles = names
    elif isinstance(key, int) and key <= len(names):
        column = key - 1
    elif len(names) == 1 and not re.fullmatch(r"[\w-]+", names[0], re.ASCII):
        column = 0
    else:
        raise _not_understood(
            f"{path}: a table, and its first row has no column {key!r}: {', '.join(names)}. "
            "prompts.key is the name of the column with the text, or its number (from 1) where no "
            "row has names. If every line is a prompt, a file that ends in .txt is read so",
            text,
        )
    for line, cells in rows:
        place = f"{path}, line {line}"
        if len(cells) != len(names):
            raise _not_understood(
                f"{place}: {len(cells)} cells, where the first row has {len(names)}; a text with "
                f"{delimiter!r} in it stands in quotes",
                text,
            )
        beside = {title: cell for title, cell in zip(titles, cells, strict=False) if title and cell}
        beside.pop(names[column], None)
        yield place, PromptText(_text(cells[column], f"{place}, column {key!r}"), beside)


def _rows(path: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """(line of its end, cells) of every row that is not blank."""
    reason = ""
    # Where tabs part the cells, many files have no quotes but those of the text.
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE)[: 1 + (delimiter == "\t")]:
        reader = _reader(io.StringIO(text), delimiter, quoting)
        try:
            rows = [(reader.line_num, [cell.strip(_BLANK) for cell in row]) for row in reader]
            return [(line, cells) for line, cells in rows if any(cells)]
        except csv.Error as error:
            reason = f"{path}, line {reader.line_num}: no row of a table: {error}"
    raise _not_understood(reason, text)


def _cells(lines: Iterable[str], delimiter: str) -> list[str]:
    """Of the first line; none where it is no row of a table."""
    try:
        return [cell.strip() for cell in next(_reader(lines, delimiter), [])]
    except csv.Error:
        return []


def _reader(lines: Iterable[str], delimiter: str, quoting: Any = csv.QUOTE_MINIMAL) -> Any:
    return csv.reader(
        lines, delimiter=delimiter, quoting=quoting, skipinitialspace=True, strict=True
    )


def _lines(path: Path, text: str, key: str) -> Iterator[tuple[str, PromptText]]:
    """Lines that are not empty, without a first one that is a column's name."""
    first = True
    for number, line in enumerate(text.split("\n"), start=1):
        if is_blank(line):
            continue
        prompt = line.strip().strip(_BLANK)
        if _JSON_START.match(prompt) or _ONLY_MARKS.match(prompt):
            raise _not_understood(f"{path}, line {number}: {prompt!r:.60} is no prompt", text)
        if not first or prompt.lower() != key.lower():
            yield f"{path}, line {number}", PromptText(prompt)
        first = False


def _named(names: Iterable[str], key: str, place: str, kind: str) -> str:
    """The name that is ``key``, or else is it but for capital letters."""
    alike = [name for name in names if name.lower() == key.lower()]
    if key in alike or len(alike) == 1:
        return key if key in alike else alike[0]
    raise PromptFileError(
        f"{place}: no {kind} {key!r}; it has {', '.join(names) or 'none'} (prompts.key names the "
        "one with the text)"
    )


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise PromptFileError(f"{place}: expected a text, found {value!r:.60}")
    text = value.strip()
    if is_blank(text):
        raise PromptFileError(f"{place}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair; no tokenizer and no file takes it.
        raise PromptFileError(f"{place}: no Unicode text: {error.reason}, {value!r:.60}") from None
    return text


def _not_understood(reason: str, text: str) -> PromptFileError:
    """With the first lines, as they are."""
    lines = [f"{line!r:.100}" for line in text.split("\n") if line.strip(_BLANK)]
    return PromptFileError("\n  ".join([f"{reason}. It begins:", *lines[:SHOWN_LINES]]))
