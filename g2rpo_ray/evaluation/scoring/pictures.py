"""Where pictures to score come from: a folder, a webdataset's tar files, parquet files."""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import cause_of, files_under, name_text
from g2rpo_ray.common.prompt_text import PromptText, metadata_of
from g2rpo_ray.rewards.scorers.pictures import as_pictures

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
CAPTION_KEYS = ("prompt", "caption", "text")
"""Columns, and keys of a webdataset's JSON, in which a picture's text may stand."""
LARGEST_PX = 2**26
"""Of one picture; 200 MB when it is unpacked."""
ROWS_AT_ONCE = 16


class ScoreError(InputError):
    """Pictures cannot be scored as asked; the message names option or file, and what is allowed."""


class PictureError(Exception):
    """One picture cannot be used; the message says why."""


@dataclass(frozen=True)
class Picture:
    """One picture that was found."""

    name: str
    """Known by it: its path in the folder, or file, ``#`` and key or row."""
    prompt: str | None
    """Its text; None where it has none, which a scorer may do without."""
    content: str
    """Another one when its file is another."""
    read: Callable[[], bytes]
    """Its file's content; may raise OSError."""
    no_prompt: str = ""
    """Why it has no text, where that is a fault."""

    @property
    def stamp(self) -> str:
        """All that its scores depend on: of another file, text or metadata, another one."""
        text = None if self.prompt is None else [self.prompt, dict(metadata_of(self.prompt))]
        told = json.dumps([self.content, text], default=str)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Found:
    """What there is to score; nothing is read yet."""

    folder: Path
    """That the names of files are relative to."""
    images: list[str]
    """Names of picture files; empty where ``packed`` holds them."""
    packed: list[Path]
    """Tar or parquet files."""


def find_pictures(path: Path) -> Found:
    """Pictures under a folder, else its tar files, else its parquet files; or one such file.

    Raises:
        ScoreError: there is nothing of that kind, or a folder below it cannot be read.
    """
    if path.is_file() and path.suffix.lower() in (".tar", ".parquet"):
        return Found(path.parent, [], [path])
    if not path.is_dir():
        raise ScoreError(f"{path}: no such folder, and no .tar or .parquet file")
    try:
        names = files_under(path)
    except OSError as error:
        raise ScoreError(
            f"{error.filename}: cannot be read: {cause_of(error, error.filename)}; what is in it "
            "would be missed: let it be read, or name a folder without it"
        ) from error
    images = [name.as_posix() for name in names if name.suffix.lower() in SUFFIXES]
    if images:
        return Found(path, sorted(images, key=in_order), [])
    for suffix in (".tar", ".parquet"):
        if packed := [path / name for name in names if name.suffix.lower() == suffix]:
            return Found(path, [], packed)
    raise ScoreError(
        f"{path}: 0 pictures in it: no file that ends in {', '.join(SUFFIXES)}, .tar or .parquet"
    )


def in_order(name: str) -> list[tuple[int, str]]:
    """To sort names as people count: 2 before 10."""
    return [(int(digits or 0), word) for digits, word in re.findall(r"(\d*)(\D*)", name)]


def packed_pictures(found: Found, key: str, tell: Callable[[str], None]) -> Iterator[Picture]:
    """Pictures of tar or parquet files, one after the other; told of a file that is damaged, whose
    rest is passed over."""
    for file in found.packed:
        name = name_text(file.relative_to(found.folder).as_posix())
        read, last = (_tar if file.suffix.lower() == ".tar" else _parquet), "its beginning"
        try:
            for picture in read(file, name, key):
                last = picture.name
                yield picture
        except (tarfile.TarError, EOFError, OSError, pa.ArrowException) as error:
            tell(f"{name}: damaged after {last}, the rest is left out: {error}")


def _tar(file: Path, name: str, key: str) -> Iterator[Picture]:
    """A picture with what lies beside it under the same name: ``.txt``, ``.json``."""
    stem, parts = "", dict[str, bytes]()
    with tarfile.open(file) as archive:
        for member in archive:
            # Else the archive would remember every one.
            archive.members = []  # type: ignore[attr-defined]
            if not member.isfile():
                continue
            folder, slash, base = member.name.rpartition("/")
            first, _, suffix = base.partition(".")
            suffix = "." + suffix.lower()
            if folder + slash + first != stem or suffix in parts:
                yield from _of_parts(name, stem, parts, key)
                stem, parts = folder + slash + first, {}
            if suffix in (".txt", ".json", *SUFFIXES) and (content := archive.extractfile(member)):
                parts[suffix] = content.read()
    yield from _of_parts(name, stem, parts, key)


def _of_parts(name: str, stem: str, parts: dict[str, bytes], key: str) -> Iterator[Picture]:
    image = next((parts[suffix] for suffix in SUFFIXES if suffix in parts), None)
    if image is None:
        return
    prompt, no_prompt = None, ""
    try:
        beside = json.loads(parts.get(".json", b"{}"))
        text, beside = _caption(beside if isinstance(beside, dict) else {}, key)
        text = parts[".txt"].decode().strip() if ".txt" in parts else text
        prompt = None if text is None else PromptText(text, beside)
    except ValueError as error:
        no_prompt = f"its .txt or .json cannot be read: {error}"
    yield _packed(f"{name}#{name_text(stem)}", prompt, image, no_prompt)


def _packed(name: str, prompt: str | None, data: bytes, no_prompt: str = "") -> Picture:
    return Picture(name, prompt, f"{len(data)} {crc32(data)}", partial(bytes, data), no_prompt)


def _caption(row: dict[str, Any], key: str) -> tuple[str | None, dict[str, Any]]:
    """The text, and what else there is."""
    for name in (key, *CAPTION_KEYS):
        if isinstance(row.get(name), str):
            return row[name].strip(), {k: v for k, v in row.items() if k != name}
    return None, row


def _parquet(file: Path, name: str, key: str) -> Iterator[Picture]:
    """Rows with a column of pictures' files, as bytes or as Hugging Face's ``{bytes, path}``."""
    # Not whole row groups, which may hold gigabytes of pictures.
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as table:
        schema = table.schema_arrow
        column = next((field.name for field in schema if _holds_pictures(field.type)), None)
        if column is None:
            raise ScoreError(
                f"{file}: no column of pictures (binary, or {{bytes, path}}); it has "
                f"{', '.join(schema.names)}"
            )
        plain = [f.name for f in schema if not _holds_pictures(f.type) and f.name != column]
        number = 0
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=[column, *plain]):
            for row in batch.to_pylist():
                value = row.pop(column)
                data = value.get("bytes") if isinstance(value, dict) else value
                text, beside = _caption(row, key)
                prompt = None if text is None else PromptText(text, beside)
                yield _packed(f"{name}#{number}", prompt, data or b"")
                number += 1


def _holds_pictures(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_pictures(kind.field(place).type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def unpack(data: bytes) -> Tensor:
    """A picture's file as uint8 ``[1, H, W, 3]``.

    Raises:
        PictureError: it is none, is cut off, too large, or not of 8 bits.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > LARGEST_PX:
                raise PictureError(f"{width}x{height} pixels; allowed are {LARGEST_PX}")
            if image.mode[0] in "IF":
                raise PictureError(f"pixels of more than 8 bits (mode {image.mode}); save as 8-bit")
            return as_pictures([image])
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        # Its own words are where in memory the bytes lie.
        what = "of no format that Pillow knows" if data else "an empty file"
        raise PictureError(f"no picture that can be read: {what}") from error
    # Whatever a damaged file makes one of Pillow's decoders raise.
    except Exception as error:
        what = f"no picture that can be read: {type(error).__name__}: {error}"
        raise PictureError(what[:200]) from error
