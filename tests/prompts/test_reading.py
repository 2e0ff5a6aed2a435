"""Prompts from every format; what is wrong is named with file, line or row, and key."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.prompts import reading
from g2rpo_ray.prompts.formats import PromptFileError
from g2rpo_ray.prompts.reading import read_prompts
from tests.disks import unreadable

TEXTS = ["a cat", "红色圆圈在左边", "قطة على سطح المنزل", "a 🐈‍⬛ on a 🪑"]


def jsonl(path: Path, *lines: object) -> Path:
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(written) + "\n")
    return path


def parquet(path: Path, texts: list[object], key: str = "prompt") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": list(range(len(texts))), key: texts}), path)
    return path


def saved_to_disk(folder: Path, parts: list[list[str]]) -> Path:
    """The layout of ``datasets.Dataset.save_to_disk``: Arrow streams, and state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, texts in zip(names, parts, strict=True):
        table = pa.table({"prompt": texts})
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def error_of(path: Path, limit: int | None = 2000, key: str = "prompt") -> str:
    with pytest.raises(PromptFileError) as caught:
        read_prompts(path, limit, key)
    return str(caught.value)


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "data"
    parquet(hub / "train-00000-of-00002.parquet", list(TEXTS[:1]))
    parquet(hub / "train-00001-of-00002.parquet", list(TEXTS[1:]))
    sources = [
        jsonl(tmp_path / "p.jsonl", *({"id": 1, "prompt": text} for text in TEXTS)),
        parquet(tmp_path / "p.parquet", list(TEXTS)),
        saved_to_disk(tmp_path / "saved", [TEXTS[:3], TEXTS[3:]]),
        hub.parent,
    ]
    for source in sources:
        assert read_prompts(source, 2000) == TEXTS, source


def test_the_key_is_a_setting(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"caption": " a cat "}, "", {"caption": "a dog"})
    assert read_prompts(path, 2000, "caption") == ["a cat", "a dog"]
    assert read_prompts(parquet(tmp_path / "p.parquet", ["a"], "text"), 9, "text") == ["a"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"caption": "a dog", "id": 3}, "line 2: no key 'prompt'; it has caption, id"),
        ({"prompt": 7}, "line 2, key 'prompt': expected a text, found 7"),
        ({"prompt": None}, "line 2, key 'prompt': expected a text, found None"),
        ({"prompt": "  "}, "line 2, key 'prompt': the prompt is empty"),
        ({"prompt": "\u200b"}, "line 2, key 'prompt': the prompt is empty"),
        ({"prompt": "a \0 b"}, "line 2: holds a NUL"),
        ({"prompt": "x" * 10_000}, "line 2: 10000 characters; allowed are 2000"),
        ("[1]", "line 2: expected an object"),
        ('{"prompt": "half', "line 2: not JSON"),
        ('{"prompt": "half a \\ud83d pair"}', "line 2, key 'prompt': no Unicode text"),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path: Path, line: object, named: str) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "a cat"}, line)
    message = error_of(path)
    assert message.startswith(str(path))
    assert named in message


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("", "row 2, column 'prompt': the prompt is empty"),
        (None, "row 2, column 'prompt': expected a text, found None"),
        ("\0", "row 2: holds a NUL"),
        ("x" * 10_000, "row 2: 10000 characters"),
    ],
)
def test_a_bad_row_of_parquet_is_named(tmp_path: Path, value: object, named: str) -> None:
    path = parquet(tmp_path / "p.parquet", ["a cat", value])
    assert f"{path}, {named}" in error_of(path)


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", ["a"], "caption")
    assert f"{path}: no column 'prompt'; it has id, caption" in error_of(path)
    folder = saved_to_disk(tmp_path / "saved", [["a"]])
    assert "no column 'text'; it has prompt" in error_of(folder, key="text")


@pytest.mark.parametrize("name", ["p.parquet", "saved/data-00000-of-00001.arrow"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    folder = saved_to_disk(tmp_path / "saved", [["a cat"] * 50])
    parquet(tmp_path / "p.parquet", ["a cat"] * 50)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:40])
    message = error_of(folder if "saved" in name else file)
    assert str(file) in message
    assert "damaged" in message


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ('["data.arrow"]', "state.json: _data_files is ['data.arrow']"),
        ("5", "state.json: _data_files is 5"),
        ('[{"filename": "lost.arrow"}]', "lost.arrow: missing"),
    ],
)
def test_a_saved_dataset_whose_list_of_files_is_wrong(
    tmp_path: Path, entries: str, named: str
) -> None:
    (tmp_path / "state.json").write_text(f'{{"_data_files": {entries}}}')
    assert named in error_of(tmp_path)


def test_splits_of_a_saved_dataset_must_be_chosen(tmp_path: Path) -> None:
    saved_to_disk(tmp_path / "both" / "train", [["a cat"]])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    message = error_of(tmp_path / "both")
    assert "splits train, test; name one of its folders" in message
    assert read_prompts(tmp_path / "both" / "train", 2000) == ["a cat"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("test (test-00000-of-00001.parquet)", "train (train-00000-of-00001.parquet)"),
        ("test (default/test/0000.parquet)", "train (default/train/0000.parquet)"),
        ("test (hpd_eval.jsonl)", "train (hpd_train.jsonl)"),
        ("train (train.parquet)", "validation (val.jsonl)"),
        # A known word in the file's name says more than one in a folder's.
        ("test (dev/test.jsonl)", "train (dev/train.jsonl)"),
        ("extra (extra-00000-of-00001.parquet)", "train (train-00000-of-00001.parquet)"),
    ],
)
def test_splits_in_one_folder_must_be_chosen(tmp_path: Path, one: str, other: str) -> None:
    for named in (one, other):
        path = tmp_path / named.partition("(")[2].rstrip(")")
        path.parent.mkdir(parents=True, exist_ok=True)
        (parquet(path, ["a"]) if path.suffix == ".parquet" else jsonl(path, {"prompt": "a"}))
    message = error_of(tmp_path)
    assert f"files of the splits {one}, {other}; name one file, or a folder with one" in message


def test_parts_of_one_split_are_one_dataset(tmp_path: Path) -> None:
    parquet(tmp_path / "default" / "train" / "0000.parquet", ["a"])
    parquet(tmp_path / "default" / "train" / "0001.parquet", ["b"])
    assert read_prompts(tmp_path, 2000) == ["a", "b"]
    parquet(tmp_path / "other" / "training-00000-of-00001.parquet", ["c"])
    assert read_prompts(tmp_path, 2000) == ["a", "b", "c"]


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"")
    assert "no state.json (datasets' save_to_disk)" in error_of(tmp_path)


def test_embeddings_that_were_not_finished_are_no_dataset(tmp_path: Path) -> None:
    parquet(tmp_path / "prompts.parquet", ["a"])
    (tmp_path / "plan.json").write_text('{"dtype": "bfloat16"}')
    assert "the same g2rpo embed command goes on" in error_of(tmp_path)


def test_any_length_where_a_selection_leaves_long_ones_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "x" * 10_000})
    assert len(read_prompts(path, None)[0]) == 10_000


def test_a_folder_below_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl(tmp_path / "a.jsonl", {"prompt": "a"})
    (tmp_path / "b").mkdir()
    jsonl(tmp_path / "b" / "b.jsonl", {"prompt": "b"})
    assert read_prompts(tmp_path, None) == ["a", "b"]
    unreadable(monkeypatch, tmp_path / "b")
    assert error_of(tmp_path) == (
        f"{tmp_path}: cannot be read: [Errno 13] Permission denied: '{tmp_path}/b'"
    )


def test_a_folder_of_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_FILES", 2)
    for number in range(3):
        jsonl(tmp_path / f"{number}" / "p.jsonl", {"prompt": "a"})
    assert "more than 2 files lie in it and below; name one of them" in error_of(tmp_path)


def test_a_style_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    for name in (b"caf\xe9.json", b"photo.json"):
        (tmp_path / os.fsdecode(name)).write_text('["a prompt"]')
    styles = [metadata_of(prompt)["style"] for prompt in read_prompts(tmp_path, None)]
    assert styles == ["caf\\xe9", "photo"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("a cat\nein Bär\n".encode("utf-16-le"), ": every other byte is 0, as in UTF-16 without"),
        ("a cat\na dog\n".encode("utf-16-be"), ": every other byte is 0, as in UTF-16 without"),
        ("a cat\n".encode("utf-16") + b"\n", ", line 2: not UTF-16, whose mark it begins with"),
        ("ein Bär".encode("latin-1"), ", line 1: not UTF-8"),
    ],
)
def test_another_encoding(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(content)
    message = error_of(path)
    assert f"{path}{named}" in message
    assert message.endswith("convert the file to UTF-8")


def test_the_root_is_no_folder_of_prompts() -> None:
    assert "/: the root of a file system is no folder of prompts" in error_of(Path("/"))
