"""g2rpo score: every picture once, a kill loses and doubles nothing, what is bad is named."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo_ray.cli import main
from g2rpo_ray.common.errors import RunError
from g2rpo_ray.config.scoring import load_scoring
from g2rpo_ray.evaluation.scoring import score as score_module
from g2rpo_ray.evaluation.scoring.report import rank_correlation, rank_correlation_within
from g2rpo_ray.evaluation.scoring.score import score
from g2rpo_ray.rewards.registry import make_scorer
from tests.evaluation.scored import folder_of, lines_file, overrides, png, refused, rows_of, run


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
    assert causes[3] == "no picture that can be read: of no format that Pillow knows"
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
