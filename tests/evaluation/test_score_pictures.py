"""g2rpo score: which pictures a folder, tar or parquet file has, and which prompt each."""

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.disks import unreadable
from tests.evaluation.scored import folder_of, lines_file, overrides, png, refused, rows_of, run


@pytest.mark.parametrize(
    ("names", "rows", "expected"),
    [
        (["0.png", "1.png"], [{"prompt": "a"}, {"prompt": "b"}], ["a", "b"]),
        (["1_0.png", "1_1.png"], [{"prompt": "a"}, {"prompt": "b"}], ["b", "b"]),
        (["00001/samples/0000.png"], [{"prompt": "a"}, {"prompt": "b"}], ["b"]),
        (["y.png", "x2.png", "x10.png"], [{"prompt": t} for t in "abc"], ["c", "a", "b"]),
        (["x.png"], [{"prompt": "a", "file_name": "there/x.png"}], ["a"]),
        (
            ["a/x.png", "b/x.png", "y.png"],
            [{"prompt": "a", "file_name": "a/x.png"}, {"prompt": "b", "file_name": "x.png"}],
            ["a", "2 pictures have this name", "no prompt belongs to it"],
        ),
        (
            ["x.png"],
            [{"prompt": "a", "file": "x.png"}, {"prompt": "b", "file": "x.png"}],
            ["it has several prompts: 'a', 'b'"],
        ),
        (["3.png"], [{"prompt": "a"}], ["no prompt belongs to it"]),
    ],
)  # fmt: skip
def test_which_prompt_a_picture_has(
    tmp_path: Path, names: list[str], rows: list[dict[str, Any]], expected: list[str]
) -> None:
    folder = folder_of(tmp_path / "p", names)
    prompts = lines_file(tmp_path / "prompts.jsonl", rows)
    if all(len(wanted) > 1 for wanted in expected):
        message = refused(folder, tmp_path / "out", overrides("bright"), prompts)
        assert f"no picture has a score of bright: {expected[0]}" in message
    else:
        run(folder, tmp_path / "out", overrides("bright"), prompts)
    found = rows_of(tmp_path / "out")
    for name, wanted in zip(names, expected, strict=True):
        if len(wanted) == 1:
            assert found[name]["prompt"] == wanted
        else:
            assert wanted in found[name]["problem"]


def test_prompts_without_a_picture_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", ["0_0.png", "2_0.png"])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\nd\n")
    rows, report = run(folder, tmp_path / "out", overrides("bright"), prompts)
    assert [row["prompt"] for row in rows.values()] == ["a", "c"]
    assert "2 prompts have no picture: number 1, number 3" in report


@pytest.mark.parametrize(
    ("names", "prompts", "named"),
    [
        ([], 2, "0 pictures in it"),
        (["x.png", "y.png"], 3, "2 pictures and 3 prompts, and nothing that says which"),
        (["x.png", "y.png"], 1, "2 pictures and 1 prompts, and nothing that says which"),
        (["1.png", "2.png"], 2, "numbered from 1 to 2, and 2 prompts from 0 to 1"),
    ],
)
def test_what_cannot_be_known_is_refused(
    tmp_path: Path, names: list[str], prompts: int, named: str
) -> None:
    folder = folder_of(tmp_path / "p", names)
    folder.mkdir(exist_ok=True)
    (tmp_path / "prompts.txt").write_text("a prompt\n" * prompts)
    settings = overrides("bright")
    assert named in refused(folder, tmp_path / "out", settings, tmp_path / "prompts.txt")


def test_a_webdataset(tmp_path: Path) -> None:
    def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))

    (tmp_path / "p").mkdir()
    with tarfile.open(tmp_path / "p" / "00.tar", "w") as archive:
        add(archive, "000.png", png(51))
        add(archive, "000.txt", b"a caption")
        add(archive, "001.json", json.dumps({"caption": "two", "tag": "counting"}).encode())
        add(archive, "001.png", png(102))
        add(archive, "002.png", png(3))
        add(archive, "002.json", b"{broken")
        add(archive, "000.png", png(255))
        add(archive, "003.txt", b"no picture")
    with tarfile.open(tmp_path / "p" / "01.tar", "w") as archive:
        add(archive, "000.png", png(153))
        add(archive, "000.txt", b"three")
        add(archive, "001.png", png(4, (300, 300)) + bytes(20_000))
    cut = tmp_path / "p" / "01.tar"
    cut.write_bytes(cut.read_bytes()[:5000])
    rows, report = run(tmp_path / "p", tmp_path / "out", overrides("bright"))
    assert {name: row["bright"] for name, row in rows.items()} == {
        "00.tar#000": pytest.approx(0.2),
        "00.tar#001": pytest.approx(0.4),
        "00.tar#002": None,
        "01.tar#000": pytest.approx(0.6),
    }
    assert rows["00.tar#001"]["category"] == "counting"
    assert "its .txt or .json cannot be read" in rows["00.tar#002"]["problem"]
    assert "00.tar#000: there is one of this name already; left out" in report
    assert "01.tar: damaged after 01.tar#000" in report
    (tmp_path / "prompts.txt").write_text("a\n")
    message = refused(tmp_path / "p", tmp_path / "o", overrides("b"), tmp_path / "prompts.txt")
    assert "captions are inside" in message


def test_parquet(tmp_path: Path) -> None:
    pictures = [{"bytes": png(51 * n), "path": f"{n}.png"} for n in range(3)]
    table = {"image": [*pictures, None], "caption": list("abcd"), "style": ["photo"] * 4}
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(table), path, row_group_size=2)
    rows, _ = run(path, tmp_path / "out", overrides("bright"))
    assert [row["bright"] for row in rows.values()] == pytest.approx([0, 0.2, 0.4, None])
    assert "an empty file" in rows["p.parquet#3"]["problem"]
    assert {row["category"] for row in rows.values()} == {"photo"}
    pq.write_table(pa.table({"caption": ["a"]}), tmp_path / "none.parquet")
    message = refused(tmp_path / "none.parquet", tmp_path / "o", overrides("bright"))
    assert "no column of pictures" in message
    texts = pa.table({"image": [{"bytes": "a text"}]})
    pq.write_table(texts, tmp_path / "texts.parquet")
    message = refused(tmp_path / "texts.parquet", tmp_path / "o", overrides("bright"))
    assert "no column of pictures" in message


def test_a_caption_that_is_empty_says_so(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", ["a.png", "b.png", "c.png"])
    (folder / "a.txt").write_text(" \n")
    (folder / "b.txt").write_text("\u200b")
    message = refused(folder, tmp_path / "out", overrides("bright"))
    assert "no picture has a score of bright: the prompt is empty: give --prompts FILE" in message
    rows = rows_of(tmp_path / "out")
    for name, cause in (
        ("a", "the prompt is empty"),
        ("b", "the prompt is empty"),
        ("c", "it has no prompt"),
    ):
        assert rows[f"{name}.png"]["bright"] is None
        assert rows[f"{name}.png"]["problem"] == f"bright: {cause}"


def test_pictures_without_captions_are_no_result(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", ["a.png", "b.png"])
    settings = overrides("bright") + overrides("plain", "Plain")
    message = refused(folder, tmp_path / "out", settings)
    assert (
        f"{folder}: no picture has a score of bright: it has no prompt: give --prompts" in message
    )
    assert [row["plain"] for row in rows_of(tmp_path / "out").values()] == pytest.approx(
        [0, 1 / 255]
    )
    (folder / "b.txt").write_text("a caption")
    rows, _ = run(folder, tmp_path / "out", settings)
    assert [row["bright"] for row in rows.values()] == [None, pytest.approx(1 / 255)]


def test_damaged_pictures_are_no_result(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", ["a.png"])
    (folder / "a.png").write_bytes(b"")
    message = refused(folder, tmp_path / "out", overrides("plain", "Plain"))
    assert "no picture has a score of plain: no picture that can be read: an empty file." in message
    assert rows_of(tmp_path / "out")["a.png"]["problem"].startswith("no picture that")


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    def named(name: bytes) -> str:
        return os.fsdecode(b"caf\xe9" + name)

    folder = folder_of(tmp_path / "p", [named(b".png"), named(b"/b.png"), "plain.png"])
    (folder / named(b".txt")).write_text("a caption")
    (folder / named(b"/b.txt")).write_bytes(b"\xff")
    rows, report = run(folder, tmp_path / "out", overrides("bright"))
    assert {name: row["prompt"] for name, row in rows.items()} == {
        "caf\\xe9.png": "a caption", "caf\\xe9/b.png": None, "plain.png": None,
    }  # fmt: skip
    assert "(1 pictures, first caf\\xe9/b.png)" in report
    before = (tmp_path / "out" / "scores.jsonl").read_text()
    run(folder, tmp_path / "out", overrides("plain", "Plain"))
    assert (tmp_path / "out" / "scores.jsonl").read_text().startswith(before)


def test_names_that_are_no_utf_8_of_and_in_tar_files(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    file = tmp_path / "p" / os.fsdecode(b"\xe9.tar")
    with tarfile.open(file, "w") as archive:
        for name, content in ((b"caf\xe9.png", png(51)), (b"cut.png", bytes(20_000))):
            info = tarfile.TarInfo(os.fsdecode(name))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    file.write_bytes(file.read_bytes()[:6000])
    rows, report = run(tmp_path / "p", tmp_path / "out", overrides("plain", "Plain"))
    assert list(rows) == ["\\xe9.tar#caf\\xe9"]
    assert "- \\xe9.tar: damaged after \\xe9.tar#caf\\xe9" in report


def test_a_folder_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "p", ["a.png", "sub/deep/b.png", ".trash/c.png"])
    unreadable(monkeypatch, folder / ".trash")
    rows, _ = run(folder, tmp_path / "out", overrides("plain", "Plain"))
    assert list(rows) == ["a.png", "sub/deep/b.png"]
    unreadable(monkeypatch, folder / "sub" / "deep")
    message = refused(folder, tmp_path / "out", overrides("plain", "Plain"))
    assert f"{folder}/sub/deep: cannot be read: Permission denied" in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("scores.jsonl", '["x"]\n', "scores.jsonl: not readable"),
        ("request.json", None, "request.json: 'rewards' is no object"),
        ("request.json", "", "request.json: not readable as JSON"),
        ("request.json", "[]", "request.json: expected a JSON object"),
    ],
)
def test_damaged_files_of_an_earlier_time_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    table = pa.table({"image": [{"bytes": png(51)}], "caption": ["a"]})
    pq.write_table(table, tmp_path / "p.parquet")
    run(tmp_path / "p.parquet", tmp_path / "out", overrides("bright"))
    file = tmp_path / "out" / name
    if content is None:
        content = json.dumps(json.loads(file.read_text()) | {"rewards": []})
    file.write_text(content)
    told = refused(tmp_path / "p.parquet", tmp_path / "out", overrides("bright"))
    assert message in told
    assert "remove the file" in told
