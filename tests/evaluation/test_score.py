"""g2rpo score: every picture once, a kill loses and doubles nothing, what is bad is named."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from g2rpo_ray.cli import main
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.config.scoring import load_scoring
from g2rpo_ray.evaluation.scoring import score as score_module
from g2rpo_ray.evaluation.scoring.report import Threshold, rank_correlation, rank_correlation_within
from g2rpo_ray.evaluation.scoring.score import score
from g2rpo_ray.rewards.registry import make_scorer

SCORERS = "tests.evaluation.scorers"


def png(level: int, size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (level, level, level)).save(file, "PNG")
    return file.getvalue()


def folder_of(folder: Path, names: Sequence[str]) -> Path:
    """Pictures of rising brightness: 0, 1/255, ..."""
    for level, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(level % 256))
    return folder


def lines_file(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def overrides(name: str, kind: str = "Brightness", **options: object) -> list[str]:
    target = json.dumps(f"{SCORERS}:{kind}")
    given = [f"rewards.{name}.options.options.{k}={json.dumps(v)}" for k, v in options.items()]
    return [f"rewards.{name}.kind=python", f"rewards.{name}.options.target={target}", *given]


def run(
    pictures: Path,
    out: Path,
    settings: Sequence[str],
    prompts: Path | None = None,
    thresholds: Sequence[Threshold] = (),
) -> tuple[dict[str, dict[str, Any]], str]:
    """Rows of scores.parquet by picture, and the report; no row may be doubled."""
    report = score(load_scoring(None, [], settings), pictures, prompts, out, thresholds)
    return rows_of(out), report


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    rows = pq.read_table(out / "scores.parquet").to_pylist()
    found = {row["picture"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def refused(*arguments: Any, **named: Any) -> str:
    with pytest.raises(InputError) as caught:
        run(*arguments, **named)
    return str(caught.value)


def test_the_scores_are_the_scorers_and_agreement_is_told(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (6, 64, 64, 3), dtype=torch.uint8, generator=generator)
    prompts = ["a red circle left of a green triangle"] * 3 + ["a blue square"] * 3
    (tmp_path / "p").mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture.numpy()).save(tmp_path / "p" / f"{number // 3}_{number % 3}.png")
    kind, options = "clip", {"architecture": "local-dir:tiny_world:clip"}
    categories = [{"prompt": p, "category": c} for p, c in zip(prompts[::3], "RB", strict=True)]
    rows, report = run(
        tmp_path / "p",
        tmp_path / "out",
        [
            f"rewards.clip.kind={kind}",
            f"rewards.clip.options={json.dumps(options)}",
            *overrides("bright"),
        ],
        lines_file(tmp_path / "prompts.jsonl", categories),
        [("bright", 0.5), ("clip", -1.0)],
    )
    expected = make_scorer(kind, options, "cpu").score(pictures, prompts)
    assert list(rows) == [f"{n // 3}_{n % 3}.png" for n in range(6)]
    torch.testing.assert_close(torch.tensor([r["clip"] for r in rows.values()]), expected)
    assert [row["prompt"] for row in rows.values()] == prompts
    assert [row["category"] for row in rows.values()] == list("RRRBBB")
    assert {row["problem"] for row in rows.values()} == {None}
    for heading in ("Scores", "Agreement within prompts", "Thresholds", "By category"):
        assert f"\n## {heading}\n" in report
    assert "| clip ≥ -1 | 100.0% |" in report
    assert "| all of them |" in report


def test_a_kill_loses_and_doubles_no_row(tmp_path: Path) -> None:
    count = 400
    folder_of(tmp_path / "p", [f"{number}.png" for number in range(count)])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {number}\n" for number in range(count)))
    out, log = tmp_path / "out", tmp_path / "log"
    command = [
        sys.executable, "-m", "g2rpo_ray.cli", "score", str(tmp_path / "p"),
        "--prompts", str(prompts), "--out", str(out),
        *overrides("bright", log=str(log), sleep_s=0.05),
    ]  # fmt: skip
    scored = out / "scores.jsonl"
    for lines in (1, 3):
        child = subprocess.Popen(command, cwd=Path.cwd(), stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 300
        while not scored.exists() or scored.read_bytes().count(b"\n") < lines:
            assert child.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    # What a kill in the middle of a write leaves.
    with scored.open("ab") as file:
        file.write('[{"picture": "399.png", "prompt": "字'.encode()[:-1])
    assert main(command[3:]) == 0
    rows = rows_of(out)
    assert list(rows) == [f"{number}.png" for number in range(count)]
    for number in range(count):
        row = rows[f"{number}.png"]
        assert row["prompt"] == f"prompt {number}"
        assert row["bright"] == pytest.approx(number % 256 / 255)
    # Each kill costs one chunk at most, which is the one that was being scored.
    assert sum(map(int, log.read_text().split())) <= count + 2 * score_module.CHUNK
    before = log.read_text(), scored.read_bytes()
    assert main(command[3:]) == 0
    assert (log.read_text(), scored.read_bytes()) == before, "nothing is left to do"


def test_pictures_that_cannot_be_read_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", [f"{n}.png" for n in range(6)])
    whole = png(4, (200, 200))
    (folder / "1.png").write_bytes(whole[: len(whole) // 2])
    (folder / "2.png").write_bytes(b"")
    (folder / "3.png").write_text("<html>not found</html>")
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(folder / "4.png")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n" * 6)
    rows, report = run(folder, tmp_path / "out", overrides("bright"), prompts)
    assert [row["bright"] is None for row in rows.values()] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    causes = [row["problem"] for row in rows.values()]
    assert "no picture that can be read: OSError" in causes[1]
    assert "an empty file" in causes[2]
    assert "no picture that can be read: UnidentifiedImageError" in causes[3]
    assert "more than 8 bits (mode I;16)" in causes[4]
    assert "(1 pictures, first 2.png)" in report
    # Mended, they are scored by the same command.
    for number in range(1, 5):
        (folder / f"{number}.png").write_bytes(png(number))
    rows, _ = run(folder, tmp_path / "out", overrides("bright"), prompts)
    assert [row["bright"] for row in rows.values()] == pytest.approx([n / 255 for n in range(6)])


def test_a_scorer_that_fails_is_never_a_score(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", [f"{n}.png" for n in range(4)])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("well\nraise now\nnothing to say\nwell again\n")
    rows, report = run(folder, tmp_path / "out", overrides("bright"), prompts)
    assert [row["bright"] for row in rows.values()] == [0, None, None, pytest.approx(3 / 255)]
    assert rows["1.png"]["problem"] == "bright: ZeroDivisionError: the scorer's own bug"
    assert rows["2.png"]["problem"] == (
        "bright: no answer (NaN or infinite); metadata of its prompt: none"
    )
    assert "| bright | 2 | 2 |" in report


def test_a_scorer_that_fails_on_the_few_there_are_is_told_by_the_exit_code(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", [f"{n}.png" for n in range(3)])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\n")
    settings = overrides("bright") + overrides("bad", broken=True)
    with pytest.raises(RunError, match=r"same command tries again: bad: ZeroDivisionError"):
        run(folder, tmp_path / "out", settings, prompts)
    rows = rows_of(tmp_path / "out").values()
    assert [row["bad"] for row in rows] == [None] * 3
    assert None not in {row["bright"] for row in rows}


def test_a_scorer_that_always_fails_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    count = 5 * score_module.CHUNK
    folder = folder_of(tmp_path / "p", [f"{n}.png" for n in range(count)])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {n}\n" for n in range(count)))
    log = tmp_path / "log"
    settings = overrides("bright") + overrides("bad", broken=True, log=str(log))
    with pytest.raises(RunError, match=r"same command tries again: bad: ZeroDivisionError"):
        run(folder, tmp_path / "out", settings, prompts)
    rows = rows_of(tmp_path / "out").values()
    assert {row["bad"] for row in rows} == {None}
    assert None not in {row["bright"] for row in rows}
    asked = sum(map(int, log.read_text().split()))
    assert asked == score_module.FAILED_CHUNKS * score_module.CHUNK * 2, "together, then alone"
    # Mended, it is asked for all; what has scores already is not, and cannot change.
    log.unlink()
    mended = overrides("bad", log=str(log))
    again, _ = run(folder, tmp_path / "out", overrides("bright") + mended, prompts)
    assert [row["bad"] for row in again.values()] == [row["bright"] for row in rows]
    assert sum(map(int, log.read_text().split())) == count
    changed = overrides("bright", sleep_s=0.01) + mended
    assert "begun with other rewards.bright" in refused(folder, tmp_path / "out", changed, prompts)


def test_metadata_that_a_scorer_wants(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", ["a.png", "b.png"])
    prompts = lines_file(
        tmp_path / "prompts.jsonl",
        [
            {"file_name": "a.png", "prompt": "one", "words": "HI"},
            {"file_name": "b.png", "prompt": "two"},
        ],
    )
    rows, _ = run(folder, tmp_path / "out", overrides("ocr", wants="words"), prompts)
    assert rows["a.png"]["ocr"] == 0
    assert rows["b.png"]["ocr"] is None
    assert "no words in the prompt file" in rows["b.png"]["problem"]


def test_what_has_changed_is_scored_again(tmp_path: Path) -> None:
    """A picture of the same size, another text beside it; in a tar of the same size, too."""
    folder, log = folder_of(tmp_path / "p", ["a.bmp", "b.bmp", "c.bmp"]), tmp_path / "log"

    def draw(name: str, level: int) -> None:
        Image.new("RGB", (8, 8), (level, level, level)).save(folder / name, "BMP")

    for name in ("a", "b", "c"):
        draw(f"{name}.bmp", 51)
        (folder / f"{name}.txt").write_text(f"caption {name}\n")
    rewards = overrides("bright", log=str(log))
    run(folder, tmp_path / "out", rewards)
    draw("a.bmp", 102)
    (folder / "b.txt").write_text("caption B\n")
    rows, _ = run(folder, tmp_path / "out", rewards)
    assert [row["bright"] for row in rows.values()] == pytest.approx([0.4, 0.2, 0.2])
    assert [row["prompt"] for row in rows.values()] == ["caption a", "caption B", "caption c"]
    assert log.read_text().split()[-1] == "2"

    def pack(colour: str) -> Path:
        with tarfile.open(tmp_path / "p.tar", "w") as archive:
            for name, data in (
                ("0.bmp", (folder / "c.bmp").read_bytes()),
                ("0.json", json.dumps({"prompt": "a wheel", "colour": colour}).encode()),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return tmp_path / "p.tar"

    for colour in ("green", "brown", "brown"):
        run(pack(colour), tmp_path / "packed", rewards)
    assert log.read_text().split()[-3:] == ["2", "1", "1"]

    # Of a folder from before, all is scored again.
    lines = (tmp_path / "packed" / "scores.jsonl").read_text()
    old = json.loads(lines.splitlines()[0])
    old[0] = {"size_bytes": 3} | {k: v for k, v in old[0].items() if k != "stamp"}
    (tmp_path / "packed" / "scores.jsonl").write_text(json.dumps(old) + "\n")
    rows, _ = run(tmp_path / "p.tar", tmp_path / "packed", rewards)
    assert [row["bright"] for row in rows.values()] == pytest.approx([0.2])
    assert log.read_text().split()[-3:] == ["1", "1", "1"]


def test_further_rewards_leave_the_others_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", ["a.png", "b.png"])
    (folder / "a.txt").write_text("a caption\n")
    log = tmp_path / "log"
    first = overrides("bright", log=str(log))
    rows, _ = run(folder, tmp_path / "out", first)
    assert [row["bright"] for row in rows.values()] == [0, None]
    assert rows["b.png"]["problem"] == "bright: it has no prompt"
    rows, _ = run(folder, tmp_path / "out", first + overrides("plain", "Plain"))
    assert rows["a.png"]["prompt"] == "a caption"
    assert [row["plain"] for row in rows.values()] == pytest.approx([0, 1 / 255])
    assert log.read_text().split() == ["1"]
    changed = first + overrides("plain", "Plain", sleep_s=0.01)
    assert "was begun with other rewards.plain" in refused(folder, tmp_path / "out", changed)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    assert "begun with other prompts" in refused(folder, tmp_path / "out", first, prompts)


def test_a_scorer_that_compares_gets_a_prompts_pictures_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_module, "CHUNK", 4)
    folder = folder_of(tmp_path / "p", [f"{p}_{n}.png" for p in range(4) for n in range(3)])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\nd\n")
    rows, _ = run(folder, tmp_path / "out", overrides("group", "Group"), prompts)
    assert {row["group"] for row in rows.values()} == {3}


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
    found, _ = run(folder, tmp_path / "out", overrides("bright"), prompts)
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


def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "p", ["0.png"])
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    plain = overrides("plain", "Plain")
    assert "no such folder" in refused(tmp_path / "none", tmp_path / "out", plain)
    assert "--out" in refused(folder, tmp_path / "file", plain)
    assert "holds something else (thesis.tex)" in refused(folder, tmp_path / "full", plain)
    (tmp_path / "full" / "request.json").write_text('{"rows": {}, "rewards": {}}')
    assert "holds something else (request.json)" in refused(folder, tmp_path / "full", plain)
    threshold = [("hps", 1.0)]
    message = refused(folder, tmp_path / "out", plain, thresholds=threshold)
    assert "--threshold hps: no such reward; there are plain" in message
    arguments = ["score", str(folder), "--out", str(tmp_path / "out")]
    for more, named in [
        (["--reward", "hpps"], "--reward hpps: no reward of --config, which is not given"),
        (["--reward", "clip"], "rewards.clip.options: architecture: missing"),
        (["--reward", "oracle", "iterations=3"], "override 'iterations': scoring reads"),
        ([], "no reward: name kinds of scorers with --reward"),
        (["--reward", "problem", *overrides("problem")], "reward 'problem': scores.parquet has"),
    ]:
        assert main([*arguments, *more]) == 2
        assert named in capsys.readouterr().err


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


def test_rank_correlation() -> None:
    one = np.array([1.0, 2, 2, 3, np.nan, 9])
    other = np.array([1.0, 3, 2, 4, 5, np.nan])
    assert rank_correlation(one, other) == pytest.approx(0.9486832980505138)  # scipy.stats
    assert rank_correlation(one, -one) == pytest.approx(-1)
    assert np.isnan(rank_correlation(one, one * 0))
    groups = np.array([0, 1, 0, 1, 2])
    rising, falling = np.array([1.0, 5, 2, 6, 0]), np.array([8.0, 3, 9, 2, 0])
    assert rank_correlation_within(rising, falling, groups) == pytest.approx(0)
    assert rank_correlation_within(rising, rising, groups) == pytest.approx(1)


def test_a_caption_that_is_empty_says_so(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "p", ["a.png", "b.png", "c.png"])
    (folder / "a.txt").write_text(" \n")
    (folder / "b.txt").write_text("\u200b")
    rows, _ = run(folder, tmp_path / "out", overrides("bright"))
    for name, cause in (
        ("a", "the prompt is empty"),
        ("b", "the prompt is empty"),
        ("c", "it has no prompt"),
    ):
        assert rows[f"{name}.png"]["bright"] is None
        assert rows[f"{name}.png"]["problem"] == f"bright: {cause}"


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("where", ["file", "override"])
def test_scorers_compute_the_same_bits_where_a_run_is_to(
    tmp_path: Path, asked: bool, where: str
) -> None:
    folder, settings = folder_of(tmp_path / "p", ["a.png"]), "rewards:\n"
    settings += "  choosy: {kind: python, options: {target: 'tests.rewards.fakes:ChoosyScorer'}}\n"
    if where == "file":
        settings += f"model: {{path: elsewhere, deterministic: {asked}}}\n"
    file = tmp_path / "run.yaml"
    file.write_text(settings)
    given = [f"model.deterministic={asked}"] if where == "override" else []
    score(load_scoring(file, [], given), folder, None, tmp_path / "out")
    assert rows_of(tmp_path / "out")["a.png"]["choosy"] == float(asked)
