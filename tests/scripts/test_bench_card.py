"""scripts/bench_card.py: what it makes of samples and shares; a run of the tiny world is long."""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from g2rpo_ray.config import load_config
from tests.integration.command import wait_until
from tests.scripts.loading import SCRIPTS, load_script

RECIPE = SCRIPTS.parent / "configs" / "flux_g2rpo_hps_one_gpu_lora.yaml"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("bench_card")


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("memory_plot")


def test_every_named_process_is_sampled_and_no_other(tmp_path: Path) -> None:
    code = "import time\nfrom g2rpo_ray.common.logs import log_as\n{}\ntime.sleep(1.3)"
    paths = [str(SCRIPTS / "watching"), str(SCRIPTS.parent)]
    environment = os.environ | {
        "PYTHONPATH": ":".join(paths), "G2RPO_MEMORY_SAMPLES": str(tmp_path)
    }  # fmt: skip
    children = {
        named: subprocess.Popen([sys.executable, "-c", code.format(named)], env=environment)
        for named in ('log_as("learner", 0)', "")
    }
    assert [child.wait(60) for child in children.values()] == [0, 0]
    pid = children['log_as("learner", 0)'].pid
    (file,) = tmp_path.iterdir()
    assert file.name == f"{pid}.csv"
    tick, role, reserved, allocated, free, nvml = file.read_text().splitlines()[-1].split(",")
    assert (role, free, nvml) == ("learner", "-1", "-1")
    assert float(tick) % 0.5 == 0
    assert abs(time.time() - float(tick)) < 10
    assert 1e6 < int(reserved) == int(allocated) < 1e9


@pytest.mark.parametrize(
    ("nvml", "limit", "whole", "rest"),
    [
        (-1, 38.0, 13.0, {"contexts and others": 4.0}),
        (8 * 2**30, None, 16.0, {"contexts and others": 8.0}),
        (-1, None, 9.0, {}),
    ],
)
def test_what_no_role_reserves_is_the_rest_of_what_is_taken(
    plot: ModuleType,
    tmp_path: Path,
    nvml: int,
    limit: float | None,
    whole: float,
    rest: dict[str, float],
) -> None:
    gib = 2**30
    for pid, lines in {
        "7": [(100.0, "rollout", 5 * gib, gib, 26 * gib), (100.5, "rollout", 6 * gib, 0, 25 * gib)],
        "9": [(100.0, "learner", 3 * gib, gib, 26 * gib)],
        "8": [(100.5, "driver", gib, gib, -1)],
    }.items():
        text = "".join(",".join(map(str, (*line, nvml))) + "\n" for line in lines)
        (tmp_path / f"{pid}.csv").write_text(text)
    parts = {"rollout worker": {"weights": 9.0, "reserve": 3.0}}
    plan = {"memory_gib": parts, "fullest_card_gib": 12.0}
    found = plot.keep(tmp_path, tmp_path / "memory", plan, limit)
    # The learner was late for the second tick; the driver has nothing on the card.
    assert found["peak_reserved_gib"] == {"learner": 3.0, "rollout": 6.0} | rest
    assert found["peak_of_all_gib"] == whole
    assert found["peak_allocated_gib"] == {"learner": 1.0, "rollout": 1.0}
    picture = (tmp_path / "memory.svg").read_text()
    assert picture.count('id="FillBetweenPolyCollection_') == 2 + len(rest)
    assert "rollout 6.0" in picture
    assert "plan 12.0" in picture
    assert len((tmp_path / "memory.csv").read_text().splitlines()) == 5


def test_shares_become_those_of_a_card_of_the_limits_size(bench: ModuleType) -> None:
    config = load_config(RECIPE)
    smaller = load_config(RECIPE, bench.shares_of(config, 0.25))
    assert smaller.rollout.gpus_per_worker == 0.105
    assert smaller.learner.gpus_per_rank == 0.11
    assert smaller.rewards["hps"].gpus_per_replica == 0.0175
    assert smaller.prompts.encoder_gpus == 0


def test_a_recipe_keeps_the_rewards_that_it_trains_on(bench: ModuleType, tmp_path: Path) -> None:
    recipe = bench.write_recipe(argparse.Namespace(recipe=RECIPE), tmp_path)
    written, own = load_config(recipe), load_config(RECIPE)
    assert list(written.rewards) == ["hps"]
    assert written.model_copy(update={"rewards": own.rewards}) == own


DRIVER = """
import subprocess, sys
asleep = ["-c", "import time; time.sleep(60)"]
for title in ("ray::FrozenHolder", "ray::RolloutActor"):
    print(subprocess.Popen([title, *asleep], executable=sys.executable).pid, flush=True)
sys.stdin.read()
"""


def test_the_holder_of_this_run_is_killed_when_so_many_iterations_are_recorded(
    bench: ModuleType, tmp_path: Path
) -> None:
    asleep = ["ray::FrozenHolder", "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen(asleep, executable=sys.executable) as of_another,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as driver,
    ):
        assert driver.stdout is not None
        holder, worker = (psutil.Process(int(driver.stdout.readline())) for _ in range(2))
        watch = threading.Thread(target=bench.kill_holder, args=(driver.pid, tmp_path, 2))
        watch.start()
        record = '{"iteration": %d, "kind": "train"}\n'
        (tmp_path / "metrics.jsonl").write_text(record % 1)
        watch.join(0.5)
        assert watch.is_alive()
        assert holder.status() != psutil.STATUS_ZOMBIE
        (tmp_path / "metrics.jsonl").write_text(record % 1 + record % 2)
        watch.join(60)
        assert not watch.is_alive()
        # A signal that was sent may take a moment to come.
        wait_until(lambda: holder.status() == psutil.STATUS_ZOMBIE, "the holder's end")
        assert worker.status() != psutil.STATUS_ZOMBIE
        assert of_another.poll() is None
        for process in (worker, of_another):
            process.kill()
        driver.communicate()
