"""Files that a user gives to a script, and that it cannot use: a line of words, exit code 2."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

import program
from tests.integration.command import python_path
from tests.scripts.loading import SCRIPTS, load_script

GIVEN = {
    "plot_frontier": ["--plot", "plot.svg", "--accuracy", "GIVEN"],
    "plot_frontier, seconds": ["--plot", "p", "--accuracy", "good.json", "--seconds", "GIVEN"],
    "compare_algorithms": ["--runs", "GIVEN"],
    "compare_algorithms, tuning": ["--tuning", "GIVEN", "--seeds"],
    "judgement": ["runs"],
    "rehearse": ["--work", "work", "--json", "GIVEN", "--tiny"],
    "granularity_bias": ["--data", "GIVEN"],
    "bench_card": ["GIVEN", "--out", "out", "--tiny", "--work", "work"],
    "bench_accelerations": ["--json", "out.json", "--config", "GIVEN"],
    "true_size": ["GIVEN"],
}
"""By the script, what it is called with."""
MADE_ANEW = ("compare_algorithms, tuning", "judgement", "rehearse", "granularity_bias")
"""Where a file that is not there is not missed."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "good.json").write_text('{"variants": {"fast": {"rank_correlation": 0.9}}}')
    return tmp_path


def refusal(case: str, given: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the script says of the file."""
    name = case.partition(",")[0]
    arguments = [str(given) if word == "GIVEN" else word for word in GIVEN[case]]
    script = load_script(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            program.run(script.main)
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert given.name in said
    return said


@pytest.mark.parametrize("case", [case for case in GIVEN if case not in MADE_ANEW])
def test_a_file_that_is_missing(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(case, folder / "missing.file", capsys)
    assert said.count("\n") == 0
    assert "No such file" in said or "no such configuration file" in said


@pytest.mark.parametrize("content", ["", "{", "half: [a, line", "[1, 2]", '{"other": [1]}', "\0"])
@pytest.mark.parametrize("case", GIVEN)
def test_a_file_that_holds_something_else(
    case: str, content: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = folder / "runs" / "one" / "result.json"
    given.write_text(content)
    refusal(case, given, capsys)


WRITTEN = {
    "compare_algorithms --plot": ["--runs", "runs"],
    "compare_algorithms --markdown": ["--runs", "runs"],
    "compare_algorithms --json": ["--runs", "runs"],
    "granularity_bias --plot": ["--data", "data.npz"],
    "granularity_bias --markdown": ["--data", "data.npz"],
    "judgement --markdown": ["runs"],
    "judgement --pack": ["runs"],
    "plot_frontier --plot": ["--accuracy", "good.json"],
    "bench_start --json": [],
    "bench_costs --json": [],
}
"""Script and option, with the other arguments that it needs."""


@pytest.mark.parametrize("case", WRITTEN)
def test_what_cannot_be_written_is_said_before_the_work(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, option = case.split()
    for place, cause in (
        ("good.json/out", "cannot be written: [Errno 17] File exists: 'good.json'"),
        ("runs", "a folder, or a file of others"),
    ):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *WRITTEN[case], option, place])
        with pytest.raises(SystemExit) as ended:
            program.run(load_script(name).main)
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert f"error: argument {option}: '{place}': " in told
        assert cause in told


def test_a_place_is_made_and_left_empty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program.output("new/deep/out.json") == Path("new/deep/out.json")
    assert list((folder / "new" / "deep").iterdir()) == []
    assert program.output("good.json") == Path("good.json")
    assert program.output("/dev/stdout") == Path("/dev/stdout")

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(program, "TemporaryFile", refuse)
    with pytest.raises(argparse.ArgumentTypeError, match=r"cannot be written: .*Permission denied"):
        program.output("new/out.json")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [(PermissionError(13, "Permission denied", "/a/out"), 2, "/a/out: Permission denied\n"),
     (OSError(28, "No space left on device", "/a/out"), 1, "/a/out: No space left on device\n")],
)  # fmt: skip
def test_what_the_system_refuses_is_said_in_words(
    capsys: pytest.CaptureFixture[str], error: OSError, code: int, told: str
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        program.run(main)
    assert (ended.value.code, capsys.readouterr().err) == (code, told)


def test_an_error_of_no_file_keeps_its_traceback() -> None:
    def main() -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(ConnectionResetError):
        program.run(main)


def test_every_script_ends_so() -> None:
    programs = {path.stem: path.read_text() for path in SCRIPTS.glob("*.py")}
    guarded = {
        name: text.partition('__name__ == "__main__":\n')[2] for name, text in programs.items()
    }
    other = {name for name, end in guarded.items() if end and end != "    program.run(main)\n"}
    # It takes nothing.
    assert other == {"draw_rooms"}


def test_as_a_process(folder: Path) -> None:
    (folder / "runs" / "one" / "result.json").write_text("{")
    ended = subprocess.run(
        [sys.executable, str(SCRIPTS / "judgement.py"), "runs"],
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("runs/one/result.json: not what this script reads: Invalid JSON")
    assert ended.stderr.count("\n") == 1
