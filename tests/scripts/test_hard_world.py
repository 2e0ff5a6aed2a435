"""The harder world's driver: its processes, and what it makes of their results."""

import json
import time
from pathlib import Path
from types import ModuleType

import pytest

import measuring
from comparing.runs import BASE, Job, Point, Result
from g2rpo_ray.config import load_config
from tests.integration.command import ROOT
from tests.scripts.loading import load_script, script_options


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("hard_world")


def write_task(script: ModuleType, folder: Path, name: str, body: str) -> object:
    program = folder / f"{name}.py"
    program.write_text(f"import pathlib, sys, time\n{body}\n")
    return script.Task(name, [str(program)], [folder / f"{name}.done"])


def test_tasks_run_side_by_side_and_are_done_once(script: ModuleType, tmp_path: Path) -> None:
    meet = (
        "me, other = (pathlib.Path(__file__).with_name(n) for n in {})\n"
        "me.touch()\n"
        "while not other.exists(): time.sleep(0.05)\n"
        "print(sys.argv[1:])\n"
        "pathlib.Path(__file__).with_suffix('.done').touch()"
    )
    tasks = [
        write_task(script, tmp_path, "a", meet.format(("a.there", "b.there"))),
        write_task(script, tmp_path, "b", meet.format(("b.there", "a.there"))),
    ]
    assert script.run_wave(tasks, tmp_path, time.monotonic() + 60)
    assert script.run_wave(tasks, tmp_path, time.monotonic() + 60)
    assert (tmp_path / "a.log").read_text().count("--limit-s") == 1


def test_a_task_that_pauses_or_overstays_is_not_done(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "OVERTIME_S", 1.0)
    for name, body in {"paused": "sys.exit(3)", "late": "time.sleep(60)"}.items():
        task = write_task(script, tmp_path, name, body)
        assert not script.run_wave([task], tmp_path, time.monotonic() + 1)


def test_a_task_that_fails_says_why(script: ModuleType, tmp_path: Path) -> None:
    tasks = [
        write_task(script, tmp_path, "bad", "raise ValueError('no such colour')"),
        write_task(script, tmp_path, "good", "print('well')"),
    ]
    with pytest.raises(RuntimeError, match=r"(?s)bad ended with 1:.*no such colour"):
        script.run_wave(tasks, tmp_path, time.monotonic() + 60)
    assert (tmp_path / "good.log").read_text() == "well\n"


def result(row: str, oracles: list[float], rewards: list[float], overrides: list[str]) -> Result:
    points = [
        Point(25 * n, 0, 0.0, {"oracle": oracle, "hps": reward, "clip": 0.5 - 0.01 * n})
        for n, (oracle, reward) in enumerate(zip(oracles, rewards, strict=True))
    ]
    config = ROOT / "configs" / "quickstart.yaml"
    job = Job(row, 0, 1e-4, 50, 0, 0.0, 25, overrides, config)
    judged = {16: {"oracle": [oracles[-1], oracles[-1] + 0.1]}}
    return Result(job, points, 0.0, iteration=50, judged=judged)


def test_a_run_is_hacked_where_its_own_rewards_rise_and_the_oracle_falls(
    script: ModuleType,
) -> None:
    base = result(BASE, [0.3], [0.5], [])
    falls = [0.3, 0.5, 0.42]
    alone = result("HPS alone", falls, [0.5, 0.6, 0.7], ["rewards.clip.weight=0"])
    assert script.hacked([base, alone]).holds
    both = result("both", falls, [0.5, 0.6, 0.7], [])  # clip falls, too
    assert not script.hacked([base, both]).holds
    down = result("HPS alone", falls, [0.5, 0.6, 0.55], ["rewards.clip.weight=0"])
    assert not script.hacked([base, down]).holds
    little = result("HPS alone", [0.3, 0.5, 0.46], [0.5, 0.6, 0.7], ["rewards.clip.weight=0"])
    assert not script.hacked([base, little]).holds


def test_conditions_have_two_sides(script: ModuleType, tmp_path: Path) -> None:
    folder = script.Folder(tmp_path)
    for value, holds in ((0.3, True), (0.19, False), (0.41, False)):
        figures = {"flux_oracle_8_steps": 0.3, "flux_oracle_16_steps": value, "flux_pictures": 9}
        folder.figures.write_text(json.dumps({"figures": figures}))
        assert script.base_oracle(folder).holds is holds
    for base, trained, holds in ((0.79, 0.9, True), (0.81, 0.79, True), (0.81, 0.81, False)):
        for value, file in ((base, folder.bias), (trained, folder.trained_bias)):
            rows = [{"row": "Λ={1}"}, {"row": "Λ={3}", "with Λ={1}": [value, 0.7, 0.9]}]
            file.write_text(json.dumps(rows))
        assert script.agreement(folder).holds is holds
    for value, holds in ((0.94, True), (0.96, False)):
        runs = [
            result("G2RPO Λ={1}", [0.3, value, 0.8], [0.5] * 3, []),
            result("HPS alone", [0.3, 0.99, 0.99], [0.5] * 3, []),
        ]
        assert script.highest_oracle(runs).holds is holds


def test_the_world_is_where_the_settings_look(script: ModuleType, tmp_path: Path) -> None:
    folder = script.Folder(tmp_path)
    script.write_settings(folder, "full", cards=0)
    text = folder.settings.read_text()
    assert text.count(str(folder.world)) == 9
    assert "runs/hard/world" not in text
    assert "gpus_per_worker: 0" in text


@pytest.mark.parametrize("cards", [0, 1])
def test_every_task_is_a_command_line_that_its_script_takes(
    script: ModuleType, tmp_path: Path, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    folder = script.Folder(tmp_path)
    script.write_settings(folder, "full", cards)
    tasks = [task for wave in script.waves(folder, "full", cards) for task in wave]
    assert len(tasks) == 10
    for program, *arguments in (task.command for task in tasks):
        options = script_options(program.removesuffix(".py"), [*arguments, "--limit-s", "60"])
        assert options.limit_s == 60
    assert [len(list(script.waves(folder, "full", cards, [part]))) for part in script.PARTS] == [
        2, 2, 1
    ]  # fmt: skip
    shared = measuring.settings("shared_card") if cards else []
    assert load_config(folder.settings, shared).rollout.gpus_per_worker == cards
