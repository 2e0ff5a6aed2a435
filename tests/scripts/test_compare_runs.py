"""A run of a comparison that pauses, and the judgement of runs that are done."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from comparing import runs
from g2rpo_ray.config import load_config
from g2rpo_ray.learner.engine import SMALL_GRADIENTS_BYTES
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import read_config_prompts
from g2rpo_ray.rollout.answers import HeldoutDraw
from tests.integration.command import ROOT, python_path
from tests.scripts.loading import load_script
from tests.tiny import equal_weights

RUN = """
import sys, types
from pathlib import Path
from comparing import runs
from g2rpo_ray.learner import engine

engine.SMALL_GRADIENTS_BYTES = int(sys.argv[3])
clock = iter([float(each) for each in sys.argv[2].split(",")])
runs.time = types.SimpleNamespace(time=lambda: next(clock))
job = runs.Job(
    "row", 3, 1e-3, 3, 0, 0.0, 2, ["evaluation.prompts=2", "sampling.members=2"],
    judge_steps=[6], keep=Path(sys.argv[1]), until_s=1.0,
)
print("done" if runs.train(job).done else "paused")
"""


def train(folder: Path, clock: str, small_bytes: int = SMALL_GRADIENTS_BYTES) -> str:
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), clock, str(small_bytes)],
        env=os.environ | {"PYTHONPATH": f"{python_path()}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()[-1]


@pytest.mark.long
def test_a_run_that_paused_ends_as_one_that_did_not(tmp_path: Path) -> None:
    straight, paused = tmp_path / "straight", tmp_path / "paused"
    assert train(straight, "0,0,0,0") == "done"
    assert train(paused, "0,0,2") == "paused"
    assert train(paused, "0,0,0") == "done"
    assert train(paused, "0") == "done"
    one, other = (
        json.loads((folder / "row-0.001-3" / "result.json").read_text())
        for folder in (straight, paused)
    )
    assert one["judged"] == other["judged"]
    assert [p["rewards"] for p in one["points"]] == [p["rewards"] for p in other["points"]]
    assert one["evaluations"] == other["evaluations"]
    assert one["updates"] == other["updates"] == 3
    assert not list(tmp_path.rglob("state-*"))
    ends = [load_file(file) for file in sorted(tmp_path.rglob(runs.WEIGHTS))]
    assert len(ends) == 2
    assert equal_weights(*ends)


@pytest.mark.long
def test_gradients_that_are_reduced_once_are_those_of_every_pass(tmp_path: Path) -> None:
    for small_bytes in (0, SMALL_GRADIENTS_BYTES):
        assert train(tmp_path / str(small_bytes), "0,0,0,0", small_bytes) == "done"
    ends = [load_file(file) for file in sorted(tmp_path.rglob(runs.WEIGHTS))]
    assert len(ends) == 2
    assert equal_weights(*ends)


def test_prompts_that_share_a_pass_have_the_scores_of_each_alone() -> None:
    config = load_config(
        ROOT / "configs" / "quickstart.yaml",
        ["evaluation.prompts=3", "evaluation.pictures_per_prompt=2", "rollout.batch_size=5"],
    )
    training = object.__new__(runs.Training)
    training.config, training.worker = config, runs.local_worker(config)
    training.device = training.worker.device
    training.together = runs.Together(training.worker)
    training.encoder = TextEncoder(config.model, config.prompts.max_sequence_length)
    texts = read_config_prompts(config, config.prompts.heldout)[:3]
    training.heldout = [training.prompt(*each) for each in enumerate(texts)]
    alone = [
        training.worker.evaluate(prompt, HeldoutDraw(4, 2)).scores for prompt in training.heldout
    ]
    together = training.heldout_scores(4, training.heldout)
    assert len(together) == 3
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            assert torch.allclose(values, other[name], atol=2e-3), name
    assert len({float(scores["hps"].sum()) for scores in together}) == 3


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("judgement")


def write_runs(folder: Path, rows: dict[str, list[float]], prompts: int = 40) -> None:
    generator = np.random.default_rng(0)
    hard = generator.normal(0, 0.3, size=prompts)
    for row, means in rows.items():
        for seed, mean in enumerate(means):
            scores = mean + hard + generator.normal(0, 0.05, size=prompts)
            judged = {"28": {"oracle": scores.tolist()}}
            file = folder / f"{row}-{seed}" / "result.json"
            file.parent.mkdir(parents=True)
            job = {"row": row, "seed": seed}
            file.write_text(json.dumps({"job": job, "done": True, "judged": judged}))


def test_pairs_are_settled_by_seeds_and_prompts(script: ModuleType, tmp_path: Path) -> None:
    write_runs(
        tmp_path,
        {
            script.BASE: [0.3],
            "better": [0.50, 0.51, 0.52, 0.50, 0.51],
            "worse": [0.40, 0.41, 0.40, 0.42, 0.41],
            "unsure": [0.40, 0.55, 0.62, 0.44, 0.59],
        },
    )
    runs = script.read_runs(tmp_path)
    text = "\n".join(script.Judgement(runs).tables())
    lines = {line.split(" |")[0]: line for line in text.splitlines()}
    assert "settled" in lines["| better - worse"]
    assert "seeds" in lines["| unsure - better"]
    assert lines["| worse"].endswith("% |")
    script.pack(runs, tmp_path / "judged.npz")
    assert "\n".join(script.Judgement(script.read_runs(tmp_path / "judged.npz")).tables()) == text


def test_rows_are_compared_by_the_seeds_that_both_have(script: ModuleType) -> None:
    scores = {("one", 1): 0.5, ("one", 2): 0.9, ("other", 0): 0.1, ("other", 2): 0.6}
    runs = {(row, seed): {8: {"oracle": np.full(4, mean)}} for (row, seed), mean in scores.items()}
    runs[script.BASE, 0] = {8: {"oracle": np.zeros(4)}}
    judgement = script.Judgement(runs)
    assert judgement.difference("one", "other", 8, "oracle") == pytest.approx(np.full((1, 4), 0.3))
    assert "inf; nan seeds" in "\n".join(judgement.tables())


def test_a_bootstrap_of_few_seeds_alone_settles_nothing(script: ModuleType) -> None:
    """Five seeds of one sign are above zero in every draw of them."""
    by_seed = np.array([0.01, 0.01, 0.01, 0.01, 0.3])
    runs = {("one", s): {8: {"oracle": np.full(50, by_seed[s])}} for s in range(5)}
    runs |= {("other", s): {8: {"oracle": np.zeros(50)}} for s in range(5)}
    runs[script.BASE, 0] = {8: {"oracle": np.zeros(50)}}
    assert script.interval(script.Judgement(runs).difference("one", "other", 8, "oracle"))[1] > 0
    assert "settled" not in "\n".join(script.Judgement(runs).tables())


def test_the_change_with_the_steps_is_that_of_each_run(script: ModuleType) -> None:
    of = {8: 0.9, 16: 0.5, 50: 0.3}
    runs = {
        (row, 0): {steps: {"hps": np.full(3, mean)} for steps, mean in of.items()}
        for row in (script.BASE, "row")
    }
    text = "\n".join(script.Judgement(runs).tables())
    assert "| from 16 to 50 |" in text
    assert text.count("| -0.200 (-0.200, -0.200) |") == 2


def test_a_packed_file_that_is_another_is_named(script: ModuleType, tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    np.savez(other, scores=np.zeros(3))
    with pytest.raises(script.measuring.FileError, match=r"other\.npz: not what --pack writes"):
        script.read_runs(other)


def test_seeds_that_would_settle_a_difference(script: ModuleType) -> None:
    by_seed = np.array([[0.1], [0.2], [0.3]])  # mean .2, standard deviation .1
    assert script.seeds_needed(by_seed) == 2  # (2.8 * .1 / .2)^2 = 1.96
    assert np.isnan(script.seeds_needed(by_seed[:1]))


def test_an_interval_holds_the_spread_over_seeds(script: ModuleType) -> None:
    values = np.repeat(np.array([[0.0], [1.0], [2.0], [3.0]]), 50, axis=1)
    mean, low, high = script.interval(values)
    assert mean == 1.5
    assert low < 0.9
    assert high > 2.1


def test_a_score_that_is_not_a_number_is_kept_as_such(tmp_path: Path) -> None:
    """Diversity of a single picture, for one."""
    job = runs.Job("row", 0, 1e-3, 1, 0, 0.0, 1, keep=tmp_path)
    point = runs.Point(1, 2, 3.0, {"diversity": float("nan"), "oracle": 0.5})
    result = runs.Result(job, [point], None, judged={8: {"diversity": [float("nan")]}})
    folder = job.folder
    assert folder is not None
    folder.mkdir()
    (folder / "result.json").write_bytes(TypeAdapter(runs.Result).dump_json(result))
    found = runs.kept_result(job)
    assert np.isnan(found.points[0].rewards["diversity"])
    assert np.isnan(found.judged[8]["diversity"][0])


def test_a_run_whose_state_is_not_there_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = runs.Job("row", 0, 1e-3, 9, 0, 0.0, 1, keep=tmp_path)
    folder = job.folder
    assert folder is not None
    folder.mkdir()
    result = runs.Result(job, [runs.Point(5, 2, 3.0, {})], None, iteration=5, done=False)
    (folder / "result.json").write_bytes(TypeAdapter(runs.Result).dump_json(result))
    assert runs.kept_result(job).iteration == 0
    assert "state-5.safetensors: not there" in capsys.readouterr().out
    (folder / "state-5.safetensors").touch()
    assert runs.kept_result(job).points == result.points
