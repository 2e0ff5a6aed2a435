"""A prompt file is read as what it holds, whatever its name; what is not understood is refused."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.prompts.reading import read_prompts

TEXTS = ["a red cube", 'a "blue" dog, on a mat', "红色圆圈"]
OBJECTS = [{"id": number, "prompt": text} for number, text in enumerate(TEXTS)]
LINES = "\n".join(map(json.dumps, OBJECTS))
CSV = 'id,prompt\n1,a red cube\n2,"a ""blue"" dog, on a mat"\n3,红色圆圈\n'
TSV = 'Prompt\tCategory\na red cube\tx\na "blue" dog, on a mat\ty\n红色圆圈\t\n'
WITHOUT_NAMES = "".join(f"{number}\t{text}\n" for number, text in enumerate(TEXTS))


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error_of(path: Path, key: str | int = "prompt") -> str:
    with pytest.raises(InputError) as caught:
        read_prompts(path, 2000, key)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.json", json.dumps(TEXTS, indent=1)),
        ("one_line.txt", json.dumps(TEXTS)),
        ("objects.json", json.dumps(OBJECTS, indent=2)),
        ("objects", "\ufeff\n\n" + json.dumps(OBJECTS)),
        ("styles.json", json.dumps({"anime": TEXTS[:1], "photo": TEXTS[1:]})),
        ("styles_of_objects.json", json.dumps({"anime": OBJECTS[:2], "photo": OBJECTS[2:]})),
        ("columns.json", json.dumps({"id": [1, 2, 3], "prompt": TEXTS})),
        ("lines.json", LINES),
        ("lines.ndjson", LINES.replace("\n", "\r\n\r\n")),
        ("LINES.JSONL", "\ufeff" + LINES + "\n"),
        ("lines.txt", LINES.replace('"prompt"', '"Prompt"')),
        ("texts.jsonl", "\n".join(map(json.dumps, TEXTS))),
        ("broken_over_lines.txt", "\n".join(json.dumps(one, indent=2) for one in OBJECTS)),
        ("table.csv", CSV),
        ("table.txt", CSV),
        ("table.CSV", "\ufeff" + CSV.replace("\n", "\r\n")),
        ("semicolons.csv", CSV.replace(",", ";").replace("dog;", "dog,")),
        ("parti.tsv", TSV),
        ("parti.txt", TSV.replace("\n", "\r")),
        ("blank_rows.csv", CSV + ",\n\n"),
        ("one_column.csv", 'prompt\na red cube\n"a ""blue"" dog, on a mat"\n红色圆圈\n'),
        ("no_name.csv", 'a red cube\n"a ""blue"" dog, on a mat"\n红色圆圈\n'),
        ("quoted.txt", '"a red cube"\n"a ""blue"" dog, on a mat"\n"红色圆圈"\n'),
        ("old_mac.txt", "\r".join(TEXTS) + "\r"),
        ("windows.txt", ("\ufeff" + "\r\n".join(TEXTS)).encode("utf-16-le")),
        ("named.txt", "\n".join(["prompt", *TEXTS])),
    ],
)
def test_one_meaning_in_any_form(tmp_path: Path, name: str, content: bytes | str) -> None:
    assert read_prompts(write(tmp_path / name, content), 2000) == TEXTS


def test_parquet_and_arrow_under_any_name(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3], "prompt": TEXTS})
    pq.write_table(table, tmp_path / "p.txt")
    for name, write_ipc in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, write_ipc(sink, table.schema) as ipc:
            ipc.write_table(table)
    for name in ("p.txt", "file", "stream"):
        assert read_prompts(tmp_path / name, 2000) == TEXTS
    assert "no column 'text'; it has id, prompt" in error_of(tmp_path / "file", "text")
    broken = pa.array([b"a", b"\xff"], pa.binary()).view(pa.utf8())
    pq.write_table(pa.table({"prompt": broken}), tmp_path / "broken.parquet")
    message = error_of(tmp_path / "broken.parquet")
    assert "damaged, after row 0: " in message
    assert "Invalid UTF8 sequence at string index 1" in message


def test_a_column_by_its_name_or_where_there_are_none_by_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", "text,id\na cat,1\na dog,2\n")
    assert read_prompts(path, 2000, "text") == ["a cat", "a dog"]
    message = error_of(path)
    assert "a table, and its first row has no column 'prompt': text, id" in message
    assert "its number (from 1) where no row has names" in message
    for name in ("no_names.tsv", "no_names.txt"):
        path = write(tmp_path / name, WITHOUT_NAMES)
        assert read_prompts(path, 2000, 2) == TEXTS
        assert "no column 'prompt': 0, a red cube" in error_of(path)
        assert "no column 3" in error_of(path, 3)
    # A name, or a prompt of one word: nobody can tell.
    path = write(tmp_path / "one.csv", "caption\na cat\n")
    assert "no column 'prompt': caption" in error_of(path)
    assert read_prompts(path, 2000, 1) == ["caption", "a cat"]


@pytest.mark.parametrize(
    "prompts",
    [
        ["a cat, oil on canvas, 1890", "a dog; a bone", 'a sign that says "hello"'],
        ["[cinematic] a cat", "(masterpiece), a dog", "<lora:x:1> a mouse", "{cat|dog}"],
        ["a prompt, a cat", "tab\tinside", "..."],
        ['"Deep" is what it "says"', '"a" b "c"'],
    ],
)
def test_plain_lines_stay_plain(tmp_path: Path, prompts: list[str]) -> None:
    assert read_prompts(write(tmp_path / "p.txt", "\n".join(prompts)), 2000) == prompts


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("cut.json", '["a cat",\n"a do', "line 2: not JSON: Unterminated string"),
        ("python.txt", "['a cat', 'a dog']", "line 1: not JSON: Expecting value"),
        ("commas.jsonl", '{"prompt": "a"},\n{"prompt": "b"}', "line 1: not JSON"),
        ("plain.jsonl", "a cat\na dog", "line 1: not JSON: Expecting value"),
        ("deep.json", "[" * 100_000, "line 1: JSON nested too deep"),
        ("long.jsonl", '{"prompt": "a", "n": ' + "1" * 5001 + "}", "a number of too many digits"),
        ("late.txt", "a cat\n[\n", "line 2: '[' is no prompt"),
        ("late.txt", 'a cat\n{"prompt": "a"}\n', """line 2: '{"prompt": "a"}' is no prompt"""),
        ("commas.csv", "prompt,id\na cat, a dog,1\n", "line 2: 3 cells, where the first row has 2"),
        ("quotes.csv", 'prompt,id\n"a cat" and,1\n', "line 2: no row of a table"),
        ("open.csv", 'prompt,id\n"a cat,1\n', "line 2: no row of a table"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_first_lines(
    tmp_path: Path, name: str, content: str, named: str
) -> None:
    message = error_of(write(tmp_path / name, content))
    assert named in message
    first = content.split("\n")[0]
    assert message.endswith("\n  ".join(f"{one!r:.100}" for one in content.split("\n") if one))
    assert f"It begins:\n  {first!r:.100}" in message


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (json.dumps(["a", 3]), "entry 2: expected an object with the key 'prompt', or a text"),
        (json.dumps([["a"]]), "entry 1: expected an object"),
        (json.dumps({"anime": ["a", ""]}), "'anime', entry 2: the prompt is empty"),
        (json.dumps({"anime": ["a"], "n": 2}), "line 1: no key 'prompt'; it has anime, n"),
        (json.dumps([{"caption": "a"}]), "entry 1: no key 'prompt'; it has caption"),
        (json.dumps([{"prompt": None}]), "entry 1, key 'prompt': expected a text, found None"),
        (b"PK\x03\x04\x00\xff", "a zip file or a spreadsheet"),
        (gzip.compress(b"a cat", mtime=0), "compressed by gzip: unpack it"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("\n<!DOCTYPE html>\n<html>sign in</html>", "a web page"),
    ],
)
def test_what_holds_something_else_is_named(
    tmp_path: Path, content: bytes | str, named: str
) -> None:
    assert named in error_of(write(tmp_path / "p.txt", content))


def test_a_folder_of_any_kind_of_data_files(tmp_path: Path) -> None:
    write(tmp_path / "hub/README.txt", "nothing to draw")
    write(tmp_path / "hub/dataset_infos.json", "{}")
    write(tmp_path / "hub/.cache/huggingface/x.json", "{}")
    write(tmp_path / "hub/data/a.CSV", "prompt,id\na cat,1\n")
    write(tmp_path / "hub/data/b.tsv", "id\tprompt\n1\ta dog\n")
    assert read_prompts(tmp_path / "hub", 2000) == ["a cat", "a dog"]
    write(tmp_path / "HPDv2/train.json", "[]")
    write(tmp_path / "HPDv2/test.json", "[]")
    found = "files of the splits test (test.json), train (train.json); name one file"
    assert found in error_of(tmp_path / "HPDv2")
