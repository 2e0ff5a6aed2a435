"""scripts/rehearse.py: what counts against a stage; the whole path on the tiny world is long."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from g2rpo_ray import cli
from g2rpo_ray.config import load_config
from tests.scripts.loading import SCRIPTS, load_script, script_options

ROOT = SCRIPTS.parent
RECIPES = sorted((ROOT / "configs").glob("flux*.yaml"))


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    module = load_script("rehearse")
    monkeypatch.setattr(module, "LEAVING_S", 1.0)
    # pytest's own standard output is no text wrapper.
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    return module


def parse(rehearse: ModuleType, folder: Path, *more: str) -> tuple[Any, Any]:
    return rehearse.parse(["--work", str(folder), "--json", str(folder / "found.json"), *more])


def walked(rehearse: ModuleType, folder: Path, code: str, **settings: Any) -> dict[str, Any]:
    """What was seen of one stage that runs ``code``."""
    (folder / "logs").mkdir()
    one = rehearse.Stage("one", ["-c", code], settings.pop("needs_s", 120.0), **settings)
    rehearsal = rehearse.Rehearsal(folder, folder / "found.json", True, ["x=1"])
    good = rehearsal.walk([one], 600.0)
    found = json.loads((folder / "found.json").read_text())["stages"]["one"]
    assert good == found["good"]
    return dict(found)


@pytest.mark.parametrize("tiny", [[], ["--tiny"]], ids=["true size", "tiny"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_its_path(
    rehearse: ModuleType, tmp_path: Path, recipe: Path, tiny: list[str]
) -> None:
    options, config = parse(rehearse, tmp_path, "--recipe", str(recipe), *tiny, "seed=3")
    stages = rehearse.stages_of(options, config)
    names = [stage.name for stage in stages]
    forms = ["adapter", "merged"] if config.model.lora else ["full"]
    exports = [name for form in forms for name in (form, f"load-{form}")]
    assert names == [
        "build", "download", "embed", "plan", "dry-run", "doctor", "train", "resume", *exports,
        "sample", "evaluate", "quickstart",
    ]  # fmt: skip
    assert (config.seed, config.sampling.members) == (3, 4)
    for arguments in (stage.arguments for stage in stages):
        if arguments[:2] == rehearse.CLI:
            given = cli._parse(arguments[2:])
            # The run's own settings are written by then.
            source = getattr(given, "config", None)
            if source is not None and Path(source).is_absolute():
                load_config(source, given.overrides)
        elif arguments[0] != "-c":
            given = script_options(Path(arguments[0]).stem, arguments[1:])
            load_config(given.recipe, given.overrides)


def test_a_good_stage_says_what_it_left(rehearse: ModuleType, tmp_path: Path) -> None:
    code = "from pathlib import Path; Path('a').mkdir(); Path('a/b').write_bytes(bytes(2000000))"
    found = walked(rehearse, tmp_path, code)
    assert found["good"]
    assert found["exit_code"] == 0
    assert found["left"]["a"] == "1 files, 2.0 MB"


def test_another_exit_code_is_no_success(rehearse: ModuleType, tmp_path: Path) -> None:
    found = walked(rehearse, tmp_path, "print('why'); raise SystemExit(2)")
    assert (found["good"], found["exit_code"], found["last_lines"]) == (False, 2, ["why"])


def test_settings_are_told_once(rehearse: ModuleType, tmp_path: Path) -> None:
    arguments = [*rehearse.CLI, "plan", "recipe.yaml", "x=1", "y=2 3"]
    rehearsal = rehearse.Rehearsal(tmp_path, tmp_path / "found.json", True, ["x=1", "y=2 3"])
    (tmp_path / "logs").mkdir()
    rehearsal.walk([rehearse.Stage("plan", arguments, 300.0)], 600.0)
    (row,) = rehearse.table(rehearsal.content)
    assert row["command"] == "g2rpo plan recipe.yaml SETTINGS"
    assert (row["good"], row["exit"]) == ("NO", 2)


def test_what_outlives_a_stage_is_named_and_ended(rehearse: ModuleType, tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {!r}], "
    child = child.format("import time; time.sleep(77)") + "start_new_session=True)"
    found = walked(rehearse, tmp_path, child)
    assert not found["good"]
    assert "time.sleep(77)" in found["processes_left"][0]
    stage = rehearse.Stage("one", [], 1.0)
    assert not rehearse.Rehearsal(tmp_path, tmp_path, True, []).marked(stage)


def test_the_compilers_helpers_are_ended_and_do_not_count(
    rehearse: ModuleType, tmp_path: Path
) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {!r}, {!r}], "
    child = child.format("import time; time.sleep(77)", f"{rehearse.COMPILER}/__main__.py")
    found = walked(rehearse, tmp_path, child + "start_new_session=True)")
    assert found["good"]
    stage = rehearse.Stage("one", [], 1.0)
    assert not rehearse.Rehearsal(tmp_path, tmp_path, True, []).marked(stage, compiler=True)


def test_a_stage_is_ended_at_its_limit(rehearse: ModuleType, tmp_path: Path) -> None:
    found = walked(rehearse, tmp_path, "import time; time.sleep(3600)", needs_s=0.5)
    assert (found["good"], found["exit_code"]) == (False, None)


def test_a_signal_is_sent_after_so_many_new_checkpoints(
    rehearse: ModuleType, tmp_path: Path
) -> None:
    for iteration in (1, 2):
        folder = tmp_path / f"runs/mine/checkpoints/iteration_{iteration:06}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    code = "import time; from pathlib import Path; time.sleep(1); folder = Path('runs/mine/"
    code += "checkpoints/iteration_000003'); folder.mkdir(); (folder / 'state.json').touch(); "
    ends = {"exits": (-signal.SIGKILL,), "sends": signal.SIGKILL, "after": 1}
    found = walked(rehearse, tmp_path, code + "time.sleep(3600)", **ends)
    assert found["good"]
    assert found["signal_s"] >= 1


def test_what_has_no_time_left_is_not_begun(rehearse: ModuleType, tmp_path: Path) -> None:
    rehearsal = rehearse.Rehearsal(tmp_path, tmp_path / "found.json", False, ["x=1"])
    # Nor what follows, though it needs less: it reads what the first would have left.
    export = rehearse.Stage("export", [], 1.0, makes="exports/form", beside=True)
    stages = [rehearse.Stage("one", [], 30.0), export, rehearse.Stage("two", [], 1.0)]
    assert not rehearsal.walk(stages, 20.0)
    assert not rehearsal.content["stages"]
    export = rehearse.Stage("export", [], 30.0, makes="exports/form", beside=True)
    load = rehearse.Stage("load", [], 1.0, reads="exports/form", beside=True)
    assert not rehearsal.walk([export, load], 20.0)
    assert not rehearsal.content["stages"]


def test_exports_and_who_reads_them_go_beside_what_follows(
    rehearse: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    waits = "import time; from pathlib import Path\nwhile not Path({!r}).exists(): time.sleep(0)\n"
    makes = "Path('exports/form').mkdir(parents=True); Path('exports/form/x').write_bytes(bytes(9))"
    export = rehearse.Stage(
        "export", ["-c", waits.format("asked") + makes], 60.0, makes="exports/form", beside=True
    )
    asks = rehearse.Stage("evaluate", ["-c", "open('asked', 'w')"], 60.0)
    reads = rehearse.Stage(
        "load", ["-c", "open('exports/form/x'); open('exports/form.png', 'w')"], 60.0,
        reads="exports/form", beside=True,
    )  # fmt: skip
    last = rehearse.Stage("train", ["-c", "open('exports/form.png')"], 60.0, alone=True)
    rehearsal = rehearse.Rehearsal(tmp_path, tmp_path / "found.json", True, ["x=1"])
    assert rehearsal.walk([export, reads, asks, last], 600.0)
    left = {name: list(stage["left"]) for name, stage in rehearsal.content["stages"].items()}
    assert list(left)[-1] == "train"
    assert left | {"train": []} == {
        "evaluate": ["."], "export": ["exports/form"], "load": ["exports"], "train": [],
    }  # fmt: skip
    assert not (tmp_path / "exports/form").exists()


def test_the_same_call_goes_on(rehearse: ModuleType) -> None:
    known = [rehearse.Stage(name, [], 1.0) for name in ("build", "plan", "train")]
    content = {"stages": {"build": {"good": True}, "plan": {"good": False}}}
    assert [s.name for s in rehearse.choose(known, None, content)] == ["plan", "train"]
    assert [s.name for s in rehearse.choose(known, "build,train", content)] == ["build", "train"]
    with pytest.raises(SystemExit, match="no tarin; there are: build, plan, train"):
        rehearse.choose(known, "tarin", content)


def test_the_plan_beside_what_was_measured(rehearse: ModuleType, tmp_path: Path) -> None:
    split = {"generate_s": 1.0, "learn_s": 2.0, "sync_s": 3.0}
    plan = {"configured": split, "memory_gib": {"worker": {"weights": 1.0, "state": 2.0}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    warm = {f"time/{name}": 10 * value for name, value in split.items()}
    cold = dict.fromkeys(warm, 1e6)
    train = {"iterations": {"1": cold, "2": warm}, "card_peak_gib": 4.0}
    content = {"stages": {"train": train}}
    rehearsal = rehearse.Rehearsal(tmp_path, tmp_path, True, [], content)
    rows = [tuple(row.values()) for row in rehearsal.compare()]
    assert rows[:3] == [("generate_s", 1, 10), ("learn_s", 2, 20), ("sync_s", 3, 30)]
    assert rows[3][1:] == (3.0, 4.0)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_path_on_the_tiny_world(tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    command = [
        sys.executable,
        str(SCRIPTS / "rehearse.py"),
        "--tiny",
        "--work",
        str(tmp_path / "w"),
    ]
    command += ["--json", str(result), "cluster.dashboard=false", "cluster.start_timeout_s=360"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads(result.read_text())
    assert len(found["stages"]) == 15
    assert [row["measured"] > 0 for row in found["compared"][:3]] == [True] * 3
