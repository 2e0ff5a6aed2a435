"""Whole runs of the command line: real local Ray, real Serve, real DeepSpeed, the tiny world.

All of them run beside the Ray session of the tests, as beside one that somebody left running.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from g2rpo_ray.config import Config, config_from_dict
from g2rpo_ray.learner.checkpoints.folders import list_checkpoints
from g2rpo_ray.prompts.dataset import PromptOrder
from g2rpo_ray.tracking.metrics import read_metrics
from tests.integration.command import Command, train, wait_until
from tests.tiny import ALONE, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

ITERATIONS = 3
Start = Callable[..., Command]


def config_of(run_dir: Path, *overrides: str, **rewards: dict[str, Any]) -> Config:
    """One worker, one rank, one reward: as few processes as a run can have."""
    tree = tiny_config(
        run_dir,
        f"iterations={ITERATIONS}",
        "rollout.workers=1",
        "learner.ranks=1",
        "checkpoint.every=10",
        *overrides,
    ).model_dump()
    tree["rewards"] = rewards or {"clip": tree["rewards"]["clip"] | ALONE}
    return config_from_dict(tree, source="test")


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts commands, and ends what is left of them."""
    commands: list[Command] = []

    def start_command(config: Config, *options: str, **variables: str) -> Command:
        commands.append(train(config, *options, **variables))
        return commands[-1]

    yield start_command
    for command in commands:
        command.kill()


@pytest.fixture(scope="module")
def reference(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a whole run in one go."""
    run_dir: Path = tmp_path_factory.mktemp("runs") / "run"
    command = start(config_of(run_dir))
    assert command.wait() == 0, command.text
    assert command.left_over() == []
    return run_dir


def results(run_dir: Path) -> list[dict[str, Any]]:
    """The run's metrics without times and memory."""
    kept = (
        "iteration",
        "kind",
        "weight",
        "reward/",
        "advantage/",
        "policy/",
        "groups/",
        "heldout/",
    )
    return [
        {
            name: value
            for name, value in record.items()
            if name.startswith(kept) and not name.endswith("_s")
        }
        for record in read_metrics(run_dir)
    ]


def pictures(run_dir: Path) -> dict[str, bytes]:
    folder = run_dir / "pictures" / "heldout"
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.*"))}


def checksum(run_dir: Path) -> str:
    return str(json.loads((run_dir / "summary.json").read_text())["weights_checksum"])


def assert_same_bits(run_dir: Path, reference: Path) -> None:
    assert results(run_dir) == results(reference)
    assert pictures(run_dir) == pictures(reference)
    assert checksum(run_dir) == checksum(reference)


def trained_iterations(run_dir: Path) -> int:
    return sum(record["kind"] == "train" for record in read_metrics(run_dir))


def wait_for_an_iteration(run_dir: Path, command: Command) -> None:
    wait_until(
        lambda: trained_iterations(run_dir) > 0 or command.process.poll() is not None,
        "the first iteration",
    )


def check_whole(run_dir: Path, iterations: int) -> None:
    """That the folder of a run in one go, which scored by clip alone, has what runs promise."""
    names = {path.name for path in run_dir.iterdir()}
    assert {
        "config.yaml", "versions.json", "metrics.jsonl", "checkpoints", "pictures", "summary.json",
        "report.html",
    } <= names  # fmt: skip
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["iterations"] == iterations
    assert summary["heldout"].keys() == {"clip"}
    assert summary["peak_rss_gib"] > 0
    assert [path.name for path in list_checkpoints(run_dir)] == [f"iteration_{iterations:06d}"]
    records = read_metrics(run_dir)
    trained = [("train", iteration) for iteration in range(1, iterations + 1)]
    assert [(record["kind"], record["iteration"]) for record in records] == [
        ("evaluation", 0), *trained, ("evaluation", iterations),
    ]  # fmt: skip
    assert records[1]["policy/first_max_abs_log_ratio"] < 1e-5
    assert records[1]["policy/grad_norm"] > 0


# In CI the soak's quiet run is looked at likewise, and compares the weights of two workers with
# those of one.
@pytest.mark.long
def test_a_run_leaves_what_it_promises(reference: Path) -> None:
    check_whole(reference, ITERATIONS)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
def test_more_workers_give_the_same_bits_as_one(
    reference: Path, start: Start, tmp_path: Path, workers: int
) -> None:
    run_dir = tmp_path / "run"
    overrides = (f"rollout.workers={workers}", "rollout.cpus_per_worker=0.25")
    command = start(config_of(run_dir, *overrides))
    assert command.wait() == 0, command.text
    assert command.left_over() == []
    assert_same_bits(run_dir, reference)


@pytest.fixture(scope="module")
def stopped(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Command]:
    """Of a run one step off, whose reward raises at a prompt of the fifth iteration."""
    folder: Path = tmp_path_factory.mktemp("stopped")
    prompts = [f"a red circle {number}" for number in range(10)]
    scorer = {
        "kind": "python",
        "options": {
            "target": "tests.rewards.fakes:ObedientScorer",
            "options": {"log": str(folder / "calls.log")},
        },
        "cpus_per_replica": 0.1,
        "retries": 1,
    }
    settings = ("pipeline=one_step_off", "iterations=9", f"prompts.train={folder / 'prompts.txt'}")
    config = config_of(folder / "run", *settings, obedient=scorer)
    order = PromptOrder(len(prompts), config.seed, config.sampling.prompts_per_iteration)
    prompts[order.batch(4)[0]] = "raise a red circle left of a blue square"
    (folder / "prompts.txt").write_text("\n".join(prompts))
    command = start(config)
    command.wait()
    return folder / "run", command


def test_one_step_off_trains_on_groups_one_version_old(stopped: tuple[Path, Command]) -> None:
    run_dir, command = stopped
    trained = [record for record in read_metrics(run_dir) if record["kind"] == "train"]
    assert len(trained) >= ITERATIONS, command.text
    assert [record["rollout/staleness"] for record in trained[:3]] == [0, 1, 1]
    assert [record["weight_version"] for record in trained[:3]] == [0, 0, 1]
    # The old log-probabilities are the drawing weights': with newer ones the ratio is not 1.
    assert [record["policy/first_max_abs_log_ratio"] > 1e-5 for record in trained[:2]] == [
        False,
        True,
    ]


def test_a_reward_that_raises_stops_the_run_with_its_name(stopped: tuple[Path, Command]) -> None:
    _, command = stopped
    assert command.wait() == 1, command.text
    message = command.text[command.text.index("g2rpo: ") :]
    assert "reward 'obedient' has no usable score" in message
    assert "'raise a red circle" in message
    assert "ZeroDivisionError: the scorer's own bug" in message
    assert "Traceback" not in message
    assert command.left_over() == []


@pytest.mark.long
def test_ctrl_c_saves_leaves_no_process_and_resume_ends_as_if_nothing_had_been(
    reference: Path, start: Start, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    stopped = start(config_of(run_dir))
    wait_for_an_iteration(run_dir, stopped)
    # The driver, Ray's own, a worker, a rank, a replica: what must be gone afterwards.
    assert len(stopped.processes()) > 8
    stopped.interrupt()
    assert stopped.wait() == 130, stopped.text
    assert stopped.left_over() == []
    assert "--resume auto continues from there" in stopped.text
    assert "Traceback" not in stopped.text
    done = trained_iterations(run_dir)
    assert done < ITERATIONS
    assert [path.name for path in list_checkpoints(run_dir)] == [f"iteration_{done:06d}"]
    assert (run_dir / "report.html").exists()

    resumed = start(config_of(run_dir), "--resume", "auto")
    assert resumed.wait() == 0, resumed.text
    assert_same_bits(run_dir, reference)


def test_more_workers_than_cpus_is_said_at_once(start: Start, tmp_path: Path) -> None:
    command = start(config_of(tmp_path / "run", "rollout.workers=500"))
    assert command.wait() == 2, command.text
    assert "the run wants 250.35 CPU and the cluster has" in command.text
    assert "rollout.workers=500 asks for 250" in command.text
    assert "learner.ranks=1 asks for 0.25" in command.text
    assert "Traceback" not in command.text
    assert command.left_over() == []
