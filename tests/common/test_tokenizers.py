"""Tokenizers: every way in which one cannot tell texts apart, or cannot be read, is named."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer, CLIPTokenizer, T5Tokenizer

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.tokenizers import UNLIKE, load_tokenizer

CLIP, T5 = resolve_path("tiny_world:flux/tokenizer"), resolve_path("tiny_world:flux/tokenizer_2")
ROWS = {"tokenizer": 567, "tokenizer_2": 46}


def load(cls: Any, folder: Path, rows: int | None = 567) -> Any:
    read = partial(cls.from_pretrained, folder, local_files_only=True)
    return load_tokenizer(read, folder, rows, InputError)


def error(cls: Any, folder: Path, rows: int | None = 567) -> str:
    with pytest.raises(InputError) as caught:
        load(cls, folder, rows)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CLIP, tmp_path / "tokenizer"))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """CLIP's tokenizer in the files that FLUX.1-dev's folder has."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(CLIP / "tokenizer_config.json", folder)
    model = json.loads((CLIP / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder


@pytest.fixture
def pieces(tmp_path: Path) -> tuple[Path, int]:
    """T5's tokenizer as a SentencePiece model alone, and how many pieces it has."""
    folder = tmp_path / "tokenizer_2"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"extra_ids": 0}')
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{a} {b}" for a in UNLIKE for b in ("a red fox", "a big dog")]),
        model_prefix=str(folder / "spiece"), vocab_size=40, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
    size = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / "spiece.model")
    ).get_piece_size()
    return folder, size


@pytest.mark.parametrize(
    ("cls", "folder"), [(CLIPTokenizer, CLIP), (AutoTokenizer, CLIP), (T5Tokenizer, T5)]
)
def test_whole_tokenizers_are_taken(cls: Any, folder: Path) -> None:
    tokenizer = load(cls, folder, ROWS[folder.name])
    assert tokenizer.encode(UNLIKE[0]) != tokenizer.encode(UNLIKE[1])


@pytest.mark.parametrize(
    ("cls", "source"), [(CLIPTokenizer, CLIP), (AutoTokenizer, CLIP), (T5Tokenizer, T5)]
)
@pytest.mark.parametrize("rows_are_known", [True, False])
def test_a_folder_without_its_vocabulary(
    cls: Any, source: Path, rows_are_known: bool, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "tokenizer"))
    (folder / "tokenizer.json").unlink()
    message = error(cls, folder, ROWS[source.name] if rows_are_known else None)
    assert "'red cat' and 'sky fog' get the same tokens" in message
    assert "The folder holds tokenizer_config.json" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"[]", b"null", b"\xff\xfe"])
def test_a_file_that_is_cut_short_or_of_another_kind(clip: Path, name: str, content: bytes) -> None:
    file = clip / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    message = error(CLIPTokenizer, clip)
    assert str(file) in message
    assert "JSON" in message


@pytest.mark.parametrize("content", ["{}", '{"model": 1}', (T5 / "tokenizer.json").read_text()])
def test_a_tokenizer_file_of_another_kind(clip: Path, content: str) -> None:
    (clip / "tokenizer.json").write_text(content)
    assert "its tokenizer cannot be used" in error(CLIPTokenizer, clip)


def test_a_tokenizer_that_cannot_pad(clip: Path) -> None:
    # Read as whatever tokenizer.json says; with its class comes a token to pad with.
    (clip / "tokenizer_config.json").unlink()
    assert "there is no pad_token" in error(AutoTokenizer, clip)


def test_the_files_of_flux_are_taken(plain: Path) -> None:
    one, other = (load(CLIPTokenizer, folder).encode("a red fox") for folder in (plain, CLIP))
    assert one == other


@pytest.mark.parametrize("damage", ["missing", "cut short", "vocabulary missing"])
def test_merges_that_lack(plain: Path, damage: str) -> None:
    merges = plain / "merges.txt"
    if damage == "cut short":
        lines = merges.read_text().splitlines(keepends=True)
        merges.write_text("".join(lines[: len(lines) // 2]))
        assert "are made by no merge: its merges are cut short" in error(CLIPTokenizer, plain)
    else:
        (merges if damage == "missing" else plain / "vocab.json").unlink()
        error(CLIPTokenizer, plain)


@pytest.mark.parametrize("rows", [100, 1000])
def test_the_tokenizer_of_another_model(clip: Path, rows: int) -> None:
    message = error(CLIPTokenizer, clip, rows)
    assert f"567 tokens with ids up to 564, and the text encoder has {rows} embeddings" in message


def test_a_sentencepiece_model_is_taken(pieces: tuple[Path, int]) -> None:
    folder, size = pieces
    assert load(T5Tokenizer, folder, size).encode(UNLIKE[0])


def test_a_sentencepiece_model_cut_short_is_not_called_tiktokens(pieces: tuple[Path, int]) -> None:
    folder, size = pieces
    file = folder / "spiece.model"
    file.write_bytes(file.read_bytes()[:-200])
    message = error(T5Tokenizer, folder, size)
    assert "spiece.model is cut short or no SentencePiece model" in message
    assert "tiktoken" not in message.lower()
