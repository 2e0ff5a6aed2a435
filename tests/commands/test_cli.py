"""The command line: exit codes, messages on stderr, and a dry run that starts nothing."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import ray

from g2rpo_ray.cli import main
from g2rpo_ray.config import Config, load_config, save_config
from g2rpo_ray.doctor.checks.prompts import check_prompts
from g2rpo_ray.doctor.findings import Level
from g2rpo_ray.run.folder import open_run
from g2rpo_ray.training.session import open_session
from tests.tiny import QUICKSTART, copy_flux


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> NoReturn:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", init)


def test_help_comes_at_once() -> None:
    """No library that takes seconds to import."""
    script = (
        "import sys; from g2rpo_ray import cli; cli._parse(['plan', 'run.yaml']); "
        "print([m for m in ('torch', 'ray', 'diffusers', 'transformers') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert answer.stdout == b"[]\n"


def train(*arguments: str) -> int:
    return main(["train", str(QUICKSTART), *arguments])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["learner.lr=1"], "learner.lr: unknown key"),
        (["seed"], "override 'seed': expected key.sub=value"),
        (["model.path=/no/model"], "model.path '/no/model': no such folder"),
        (["prompts.train=/no/prompts.txt"], "/no/prompts.txt: no such prompt file"),
        (["prompts.heldout=/no/prompts.txt"], "/no/prompts.txt: no such prompt file"),
        (
            ["prompts.train=tiny_world:prompts/heldout.txt"],
            "prompts.train and prompts.heldout share 288 prompts, such as 'a blue",
        ),
        (["--resume", "/no/checkpoint"], "--resume /no/checkpoint: no such folder"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_message_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    run_dir = tmp_path / "run"
    assert train(f"run_dir={run_dir}", *arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("g2rpo: ")
    assert named in printed
    assert "Traceback" not in printed
    assert not run_dir.exists()


def test_a_folder_that_has_a_run_says_what_resume_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override = f"run_dir={tmp_path / 'run'}"
    run = open_run(load_config(QUICKSTART, [override]), "none")
    (run.folder / "metrics.jsonl").write_text('{"iteration": 0, "kind": "evaluation"}\n')
    assert train(override) == 2
    assert "already has a run: --resume auto continues it" in capsys.readouterr().err


def test_a_full_disk_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", "/disk/report.html")

    monkeypatch.setattr("g2rpo_ray.training.train.train", full)
    assert train(f"run_dir={tmp_path}") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("g2rpo: [Errno 28] No space left on device: '/disk/report.html'")


def test_missing_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "/no/run.yaml"]) == 2
    assert "/no/run.yaml: no such configuration file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["sample", "run", "--prompt", "a cat", "--count", "0"],
        ["embed", "run.yaml", "p.txt", "--out", "e", "--workers", "0"],
        ["embed", "run.yaml", "p.txt", "--out", "e", "--shard-size", "0"],
        ["embed", "run.yaml", "p.txt", "--out", "e", "--limit", "-1"],
        ["export", "run", "--to", "e", "--max-shard-size", "large"],
        ["demo", "run", "--port", "99999"],
        ["demo", "run", "--port", "0"],
    ],
)
def test_numbers_out_of_range_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert f"argument {arguments[-2]}: '{arguments[-1]}': expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["export", "run", "--to", ""], "--to: empty"),
        (["export", "run", "--to="], "--to=: empty"),
        (["sample", "run", "--prompt", "a", "--checkpoint", ""], "--checkpoint: empty"),
        (["train", "run.yaml", "--resume", ""], "--resume: empty"),
        (["score", ""], "score: empty"),
    ],
)
def test_an_empty_argument_is_no_folder(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"g2rpo: {named}; it needs a value\n"


@pytest.mark.parametrize("name", ["plan", "doctor"])
def test_json_that_cannot_be_written_names_the_file_that_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("g2rpo_ray.doctor.examine.examine", lambda _: [])
    monkeypatch.setattr("g2rpo_ray.doctor.findings.as_text", lambda _: "")
    file = tmp_path / "none" / "found.json"
    assert main([name, str(QUICKSTART), "--json", str(file)]) == 2
    told = capsys.readouterr().err
    assert told == f"g2rpo: --json {file}: cannot be written: No such file or directory\n"


def test_a_configuration_in_another_encoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(QUICKSTART.read_text(), encoding="utf-16")
    assert main(["train", str(file)]) == 2
    told = capsys.readouterr().err
    assert f"{file}: cannot be read: 'utf-8' codec" in told
    assert told.endswith("save it as UTF-8\n")


def test_fewer_prompts_than_an_iteration_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.txt").write_text("a cat\na dog\na cow\na fox\n")
    run = [f"run_dir={tmp_path / 'run'}", f"prompts.train={tmp_path / 'train.txt'}"]
    told = "prompts.train has 4 prompts, and an iteration takes 5 (sampling.prompts_per_iteration)"
    for count in (4, 5):
        settings = [*run, f"sampling.prompts_per_iteration={count}"]
        assert train("--dry-run", *settings) == 0
        assert (f"warning  {told}" in capsys.readouterr().out) == (count == 5)
        config = load_config(QUICKSTART, settings)
        with open_session(config, "none"):
            assert (f"warning: {told}" in capsys.readouterr().out) == (count == 5)
        (finding,) = check_prompts(config)
        assert (finding.level, told in finding.what) == ((Level.OK, False), (Level.WARN, True))[
            count - 4
        ]


def test_a_folder_that_was_moved_is_the_run_and_not_what_lies_at_its_old_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    save_config(load_config(QUICKSTART, [f"run_dir={old}"]), new / "config.yaml")
    used: list[str] = []

    def sample(config: Config, *_: object) -> list[Path]:
        used.append(config.run_dir)
        return []

    monkeypatch.setattr("g2rpo_ray.evaluation.sample.sample", sample)
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "new", "--prompt", "a cat"]) == 0
    assert used == [str(new)]


@pytest.mark.parametrize(
    ("given", "overrides", "expected"),
    [
        ("runs/moved/config.yaml", [], "runs/moved"),
        ("runs/moved/resolved.yaml", ["seed=1"], "runs/moved"),
        ("runs/moved/config.yaml", ["run_dir=runs/other"], "runs/other"),
        ("runs/moved/mine.yaml", [], "runs/began"),
        ("project/config.yaml", [], "runs/began"),
    ],
)
def test_a_runs_own_settings_mean_the_folder_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, overrides: list[str], expected: str
) -> None:
    began = load_config(QUICKSTART, ["run_dir=runs/began"])
    monkeypatch.chdir(tmp_path)
    open_run(began, "none")
    Path("runs/began").rename("runs/moved")
    for path in (given, "runs/moved/config.yaml"):
        Path(path).parent.mkdir(exist_ok=True)
        save_config(began, Path(path))
    used: list[Path] = []
    monkeypatch.setattr("g2rpo_ray.training.train.train", lambda c, _: used.append(Path(c.run_dir)))
    monkeypatch.setattr("g2rpo_ray.plan.plan.make_plan", lambda c, *_: used.append(Path(c.run_dir)))
    monkeypatch.setattr("g2rpo_ray.plan.plan.as_text", lambda _: "")
    monkeypatch.setattr("g2rpo_ray.plan.plan.as_json", lambda _: {})
    # As one looks at it from another folder.
    monkeypatch.chdir(tmp_path if expected == "runs/began" else tmp_path / "runs")
    path = str((tmp_path / given).relative_to(Path.cwd()))
    overrides = [override.replace("runs/other", "other") for override in overrides]
    assert main(["train", path, "--resume", "auto", *overrides]) == 0
    assert main(["plan", path, *overrides]) == 0
    assert used == [tmp_path / expected] * 2


def test_dry_run_prints_the_arithmetic_and_writes_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    overrides = [
        "sampling.members=5",
        "sampling.prompts_per_iteration=3",
        "sampling.steps=6",
        "g2rpo.sde_steps=[0, 1, 2]",
        "g2rpo.granularities=[1, 2]",
        "learner.update=per_sde_step",
        "learner.steps_per_pass=1",
        "iterations=7",
    ]
    assert train("--dry-run", f"run_dir={run_dir}", *overrides) == 0
    printed = capsys.readouterr().out
    lines = dict(line.strip().split("  ", 1) for line in printed.splitlines() if "  " in line)
    assert lines["prompts"] == "3 an iteration, 21 in all"
    assert lines["groups"] == "9 of 5 members"
    # 3 prompts x 3 steps x 5 members x 2 granularities.
    assert lines["pictures"] == "90 decoded and scored"
    assert lines["updates"] == "3 (per_sde_step)"
    assert "oracle (evaluated only)" in lines["rewards"]
    assert f"resolved configuration: {run_dir}/resolved.yaml" in printed
    assert [path.name for path in run_dir.iterdir()] == ["resolved.yaml"]
    assert load_config(run_dir / "resolved.yaml") == load_config(
        QUICKSTART, [f"run_dir={run_dir}", *overrides]
    )


def test_a_dry_run_reads_the_prompts_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, prompts, absent = f"run_dir={tmp_path / 'run'}", tmp_path / "p.txt", tmp_path / "no"
    prompts.write_text("a red circle\n\na cat\n")
    assert train("--dry-run", run_dir, f"prompts.train={absent}", f"prompts.heldout={prompts}") == 0
    printed = capsys.readouterr().out
    assert f"prompts.train  {absent} is not there (yet)" in printed
    assert f"prompts.heldout  {prompts}, 2 prompts" in printed
    both = [f"prompts.train={prompts}", f"prompts.heldout={prompts}"]
    assert train("--dry-run", run_dir, *both) == 2
    assert "share 2 prompts" in capsys.readouterr().err
    prompts.write_text(" \n")
    assert train("--dry-run", run_dir, both[0]) == 2
    assert str(prompts) in capsys.readouterr().err


@pytest.mark.parametrize("compiled", ["rollout.compile=true", "learner.compile=true"])
def test_a_dry_run_looks_at_the_folder_of_compiled_code(
    tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    run_dir, cache = f"run_dir={tmp_path / 'run'}", tmp_path / "file" / "code"
    asked = ["--dry-run", run_dir, f"rollout.compile_cache={cache}"]
    assert train(*asked, compiled) == 2
    assert f"rollout.compile_cache '{cache}': cannot be written here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    # The quickstart compiles nothing: nobody would write there.
    assert train(*asked) == 0
    assert (
        train("--dry-run", run_dir, f"rollout.compile_cache={tmp_path / 'a' / 'b'}", compiled) == 0
    )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_options_may_stand_before_between_and_after_overrides(tmp_path: Path, place: int) -> None:
    arguments = [f"run_dir={tmp_path}", "seed=5"]
    arguments.insert(place, "--dry-run")
    assert train(*arguments) == 0
    assert load_config(tmp_path / "resolved.yaml").seed == 5


def test_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train("--dry-rum", "seed=5")
    assert caught.value.code == 2
    assert "--dry-rum" in capsys.readouterr().err


def test_run_dir_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert train("--dry-run", f"run_dir={file}/run") == 2
    printed = capsys.readouterr().err
    assert f"run_dir {file}/run: cannot be written" in printed


@pytest.mark.parametrize(
    "words",
    [["train", "run_dir="], ["evaluate", "--checkpoint=base", "--out="], ["export", "--to="]],
)
def test_a_path_that_no_system_looks_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path = tmp_path / ("x" * 300)
    assert main([*words[:1], str(QUICKSTART), *words[1:-1], f"{words[-1]}{path}"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("g2rpo: ")
    assert f"{path}: File name too long" in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", QUICKSTART, "run_dir={}"],
        ["train", QUICKSTART, "run_dir={}", "--dry-run"],
        ["sample", QUICKSTART, "--checkpoint", "base", "--prompt", "a cat", "--out", "{}"],
        ["evaluate", QUICKSTART, "--checkpoint", "base", "--out", "{}"],
        ["score", "{0.parents[2]}", "--config", QUICKSTART, "--out", "{}"],
        ["embed", QUICKSTART, "tiny_world:prompts/heldout.txt", "--out", "{}"],
        ["export", QUICKSTART, "--to", "{}"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_nothing_is_written_among_the_checkpoints_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str | Path]
) -> None:
    open_run(load_config(QUICKSTART, [f"run_dir={tmp_path}/run"]), "none")
    states = tmp_path / "run" / "checkpoints"
    states.mkdir()
    (tmp_path / "a.png").write_bytes(b"")
    assert main([str(word).format(states / "mine") for word in arguments]) == 2
    assert f"{states}/mine: lies in {states}, and the run" in capsys.readouterr().err
    assert list(states.iterdir()) == []


def test_what_is_missing_is_named_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert "required: CONFIG\n" in capsys.readouterr().err


def test_a_plan_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART), "--json", "/no/plan.json"]) == 2
    assert "--json /no/plan.json: cannot be written" in capsys.readouterr().err


def test_a_prompt_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    # As Python gives the byte E9, an é of Latin 1.
    assert main(["sample", str(QUICKSTART), "--prompt", "a red \udce9"]) == 2
    assert r"'a red \udce9': not text in this terminal's encoding" in capsys.readouterr().err


def test_a_path_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    flux = copy_flux(tmp_path / "modèle")
    result = subprocess.run(
        [sys.executable, "-m", "g2rpo_ray.cli", "download", QUICKSTART, f"model.path={flux}"],
        capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert r"mod\xe8le: in place" in result.stdout
