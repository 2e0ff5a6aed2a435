"""Drawing with the real sampler on the tiny world, Ray left out: weights, hybrids, going on."""

import errno
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from g2rpo_ray.cli import main
from g2rpo_ray.config import Config, save_config
from g2rpo_ray.evaluation import draw as draw_module
from g2rpo_ray.evaluation import evaluate as evaluate_module
from g2rpo_ray.evaluation import rows as rows_module
from g2rpo_ray.evaluation.draw import Drawing, base_weights
from g2rpo_ray.evaluation.records import Records
from g2rpo_ray.evaluation.rows import (
    BASE,
    EvaluationError,
    Row,
    check_steps,
    make_rows,
    parse_weights,
)
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder, delete_old_checkpoints
from g2rpo_ray.learner.checkpoints.format import (
    CheckpointError,
    CheckpointInfo,
    pin_weights,
    read_info,
    read_weights,
)
from g2rpo_ray.models.weights import WeightReceipt, load_weights
from g2rpo_ray.rollout.answers import HeldoutDraw, HeldoutPictures
from g2rpo_ray.rollout.worker import RolloutWorker
from g2rpo_ray.run.paths import RunFolderError
from g2rpo_ray.run.weights import checkpoint_named, weights_in, while_it_is_there
from g2rpo_ray.weight_sync.base import Peer, verify
from tests.states import write_checkpoint
from tests.tiny import KnownScores, Redness, encode, tiny_config

STEPS, HYBRID, PICTURES = 4, 0.5, 2
PROMPTS = [(0, "a red circle left of a green triangle"), (1, "a blue square above a yellow circle")]


@dataclass(frozen=True)
class LocalWeights:
    """Stored weights without an object store."""

    version: int
    receipt: WeightReceipt
    weights: dict[str, Tensor]
    timeout_s: float

    def send(self, receivers: Sequence[Peer]) -> None:
        answers = [peer.handle.receive_weights(self.version, self.weights) for peer in receivers]
        verify(self.receipt, receivers, answers)


class LocalPool:
    """A pool of one worker in this process."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker
        self.workers = [worker]
        self.loads = 0
        self.drawn: list[int] = []

    def sync(self, send: Any) -> None:
        self.loads += 1
        send([Peer("worker", self.worker)])

    def evaluate(
        self, prompts: Sequence[Any], _: Any, draw: HeldoutDraw, latents: Sequence[Any] = ()
    ) -> list[HeldoutPictures]:
        self.drawn += [prompt.prompt_id for prompt in prompts]
        starts = latents or [None] * len(prompts)
        return [self.worker.evaluate(p, draw, x) for p, x in zip(prompts, starts, strict=True)]

    def walk(self, prompts: Sequence[Any], _: Any, draw: HeldoutDraw) -> list[Tensor]:
        return [self.worker.walk(prompt, draw) for prompt in prompts]


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_module, "ray", SimpleNamespace(put=lambda value: value))
    monkeypatch.setattr(draw_module, "StoredWeights", LocalWeights)
    # One prompt between two writes.
    monkeypatch.setattr(draw_module, "PROMPTS_PER_WORKER", 1)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return tiny_config(
        tmp_path / "run", f"evaluation.pictures_per_prompt={PICTURES}", "rewards.hps.weight=0"
    )


@pytest.fixture
def trained(config: Config) -> dict[str, Tensor]:
    """Other weights than the base model's, in the run's last checkpoint."""
    weights = {name: tensor * 1.02 for name, tensor in base_weights(config).items()}
    folder = checkpoint_folder(Path(config.run_dir), 5)
    info = CheckpointInfo(5, 5, 5, 0, 0.0, "full", config.seed)
    write_checkpoint(folder, info, {f"weight.{name}": t for name, t in weights.items()})
    return weights


def drawing(config: Config, folder: Path, rows: list[Row], on_progress: Any) -> Drawing:
    prompts = {p.prompt_id: p for p in encode(config, [text for _, text in PROMPTS])}
    pool: Any = LocalPool(RolloutWorker(config, Redness(sorted(config.rewards))))
    encoder: Any = SimpleNamespace(heldout=lambda asked: [prompts[number] for number, _ in asked])
    request = {"rows": {row.name: None for row in rows}}
    return Drawing(config, encoder, pool, Records(folder, request), on_progress)


def rows_of(config: Config) -> list[Row]:
    return make_rows(
        parse_weights(config, ["mine=last", BASE], Path(config.run_dir).parent / "pins"),
        [STEPS],
        [HYBRID],
    )


def reds(drawn: Drawing, row: Row) -> list[Tensor]:
    records = drawn.records.of_row(row.name)
    return [torch.tensor(records[number].scores["clip"]) for number, _ in PROMPTS]


def test_each_row_is_drawn_with_its_weights_and_a_hybrid_with_both(
    config: Config, trained: dict[str, Tensor], tmp_path: Path
) -> None:
    base, mine, hybrid = rows = rows_of(config)
    drawn = drawing(config, tmp_path / "out", rows, lambda *_: None)
    drawn.run(rows, PROMPTS)

    worker = RolloutWorker(config, Redness(sorted(config.rewards)))
    prompts = encode(config, [text for _, text in PROMPTS])
    whole = HeldoutDraw(STEPS, PICTURES)
    switch = hybrid.hybrid_switch
    assert switch == 2
    expected_base = [worker.evaluate(p, whole).scores["clip"] for p in prompts]
    load_weights(worker.policy, trained)
    expected_mine = [worker.evaluate(p, whole).scores["clip"] for p in prompts]
    halfway = [worker.walk(p, HeldoutDraw(STEPS, PICTURES, last=switch)) for p in prompts]
    load_weights(worker.policy, base_weights(config))
    rest = HeldoutDraw(STEPS, PICTURES, first=switch)
    expected_hybrid = [
        worker.evaluate(p, rest, x).scores["clip"] for p, x in zip(prompts, halfway, strict=True)
    ]
    for row, expected in [(base, expected_base), (mine, expected_mine), (hybrid, expected_hybrid)]:
        for found, wanted in zip(reds(drawn, row), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not torch.equal(expected_base[0], expected_mine[0])
    assert not torch.equal(expected_hybrid[0], expected_mine[0])
    # Trained weights once, the base model's once more for the second parts.
    assert drawn.pool.loads == 2  # type: ignore[attr-defined]


def test_a_walk_in_two_parts_is_the_whole_walk(config: Config) -> None:
    worker = RolloutWorker(config, Redness(sorted(config.rewards)))
    prompt = encode(config)[0]
    whole = worker.walk(prompt, HeldoutDraw(STEPS, PICTURES))
    half = worker.walk(prompt, HeldoutDraw(STEPS, PICTURES, last=1))
    assert torch.equal(worker.walk(prompt, HeldoutDraw(STEPS, PICTURES, first=1), half), whole)


@pytest.mark.usefixtures("trained")
def test_a_killed_evaluation_draws_only_what_is_missing(config: Config, tmp_path: Path) -> None:
    rows = rows_of(config)[:2]

    def kill(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    first = drawing(config, tmp_path / "out", rows, kill)
    with pytest.raises(KeyboardInterrupt):
        first.run(rows, PROMPTS)
    seen: list[int] = []
    again = drawing(config, tmp_path / "out", rows, lambda done, _: seen.append(done))
    again.run(rows, PROMPTS)
    assert again.pool.drawn == [1]  # type: ignore[attr-defined]
    assert again.pool.loads == 1  # type: ignore[attr-defined]
    assert (seen[0], seen[-1]) == (3, 4)
    whole = drawing(config, tmp_path / "whole", rows, lambda *_: None)
    whole.run(rows, PROMPTS)
    for row in rows:
        assert again.records.of_row(row.name) == whole.records.of_row(row.name)


class _Silent(Redness):
    """Gives no score, and says why."""

    def submit(self, *args: Any) -> KnownScores:
        scores = super().submit(*args).scores
        nothing = {name: torch.full_like(values, torch.nan) for name, values in scores.items()}
        return KnownScores(nothing, failures=["the judge is silent"])


@pytest.mark.usefixtures("trained")
def test_missing_scores_are_told_and_tried_again_by_the_next_command(
    config: Config, tmp_path: Path
) -> None:
    rows = rows_of(config)
    told: list[str] = []
    first = drawing(config, tmp_path / "out", rows, lambda *_: None)
    first.pool.worker.scoring = _Silent(["hps"])  # type: ignore[attr-defined]
    first.tell = told.append
    first.run(rows, PROMPTS)
    assert [line.partition(" ")[0] for line in told] == [row.name for row in rows for _ in PROMPTS]
    assert all(line.endswith("the judge is silent") for line in told)
    again = drawing(config, tmp_path / "out", rows, lambda *_: None)
    again.run(rows, PROMPTS)
    assert again.pool.drawn == [0, 1] * len(rows)  # type: ignore[attr-defined]
    assert all(again.records.has(row.name, number) for row in rows for number, _ in PROMPTS)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["base", "a=base", "a=last"], "--checkpoint a=last: the label 'a' is taken"),
        (["my weights=last"], "the label 'my weights' may hold letters"),
        (["..=last"], "the label '..' may hold letters"),
        ([".=last"], "the label '.' may hold letters"),
        (["a=last", "a.json=last"], "the label 'a.json' may hold letters"),
    ],
)
def test_labels(config: Config, tmp_path: Path, named: list[str], message: str) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(EvaluationError, match=re.escape(message)):
        parse_weights(config, named, tmp_path / "weights")
    assert (tmp_path / "kept").exists()


@pytest.mark.usefixtures("trained")
def test_a_run_named_by_dots_has_its_own_label(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(config.run_dir)
    monkeypatch.chdir(run / "checkpoints")
    (weights,) = parse_weights(config, [".."], tmp_path / "weights")
    assert weights.label == run.name
    # What an earlier evaluation left is not what it should be.
    (tmp_path / "weights" / f"{run.name}.json").write_text("{}")
    with pytest.raises(EvaluationError, match="checkpoint, checksum, source, training missing"):
        parse_weights(config, [".."], tmp_path / "weights")


@pytest.mark.usefixtures("trained")
def test_damaged_weights_are_refused_before_anything_starts(config: Config, tmp_path: Path) -> None:
    last = checkpoint_named(config, "last")
    copy = shutil.copytree(last, tmp_path / "copy")
    for optimizer in copy.glob("optimizer-*"):
        optimizer.unlink()
    assert parse_weights(config, [f"a={copy}"], tmp_path / "pins")[0].label == "a"
    file = next(copy.glob("trainable-*"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{file}: damaged"):
        parse_weights(config, [f"b={copy}"], tmp_path / "pins")
    assert not (tmp_path / "pins" / "b").exists()
    with pytest.raises(RunFolderError, match="--checkpoint is empty: name last, best"):
        parse_weights(config, ["b="], tmp_path / "pins")
    with pytest.raises(CheckpointError, match=r"/none: not there .*--checkpoint takes last, best"):
        parse_weights(config, [f"b={tmp_path}/none"], tmp_path / "pins")


@pytest.mark.usefixtures("trained")
def test_weights_of_another_kind_are_refused_with_both_kinds(config: Config) -> None:
    lora = tiny_config(Path(config.run_dir), "model.lora={rank: 2, alpha: 4.0}")
    with pytest.raises(RunFolderError, match=r"holds 'full' weights, .* 'lora rank 2 alpha 4'"):
        parse_weights(lora, ["last"], Path(config.run_dir).parent / "pins")


@pytest.mark.parametrize(
    ("steps", "hybrids", "message"),
    [
        ([10, 0], [], "--steps 0: allowed are 1 or more"),
        ([10], [0.04], "--hybrid 0.04: of 10 steps it leaves 0 to the trained weights"),
        ([10], [1.0], "--hybrid 1: of 10 steps it leaves 10"),
        ([10], [float("nan")], "--hybrid nan: allowed are shares between 0 and 1"),
    ],
)
def test_steps_and_shares_out_of_range(
    steps: list[int], hybrids: list[float], message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        check_steps(steps, hybrids)


@pytest.mark.parametrize(
    ("steps", "hybrids", "name"),
    [
        ([6], [0.5, 0.5], "--hybrid 0.5"),
        ([6], [0.5, 0.50000001], "--hybrid 0.5"),
        ([6, 6], [0.5], "--steps 6"),
        ([6, 12, 6], [], "--steps 6"),
    ],
)
def test_a_row_that_stands_twice_is_refused(
    steps: list[int], hybrids: list[float], name: str
) -> None:
    with pytest.raises(EvaluationError, match=f"{name}: it is given twice"):
        check_steps(steps, hybrids)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    "bad",
    [
        ["--steps", "0"],
        ["--steps", "4,4"],
        ["--hybrid", "2"],
        ["--checkpoint", "last", "--checkpoint", "my weights=last"],
        ["--checkpoint", "last", "--checkpoint", "last"],
        ["--checkpoint", "last", "--checkpoint", "no/such"],
    ],
    ids=" ".join,
)
def test_no_weights_are_said_to_be_kept_where_something_is_refused(
    config: Config, bad: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(config, Path(config.run_dir) / "config.yaml")
    assert main(["evaluate", config.run_dir, "--out", str(tmp_path / "out"), *bad]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert bad[0] in told.err or bad[-1] in told.err
    assert not list((tmp_path / "out").glob("weights/*"))


@pytest.mark.usefixtures("trained")
def test_nor_where_the_folder_is_refused(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(config, Path(config.run_dir) / "config.yaml")
    (tmp_path / "request.json").write_text('{"rows": {}}')
    assert main(["evaluate", config.run_dir, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "holds another evaluation" in told.err
    assert not (tmp_path / "weights").exists()


def test_a_run_without_a_checkpoint_is_said(config: Config, tmp_path: Path) -> None:
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="no checkpoint there yet"):
        parse_weights(config, [str(tmp_path / "other")], tmp_path / "pins")


def checkpoint_of(config: Config, iteration: int, factor: float) -> Path:
    weights = {name: tensor * factor for name, tensor in base_weights(config).items()}
    folder = checkpoint_folder(Path(config.run_dir), iteration)
    info = CheckpointInfo(iteration, iteration, iteration, 0, 0.0, "full", config.seed)
    write_checkpoint(folder, info, {f"weight.{name}": t for name, t in weights.items()})
    return folder


def test_an_evaluation_of_a_running_run_goes_on_with_the_weights_it_began_with(
    config: Config,
    trained: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn: list[dict[str, Tensor]] = []

    def draw(config: Config, records: Records, rows: Sequence[Row], prompts: Any) -> None:
        """All rows but the last; the run has deleted what it began with by then."""
        newer = checkpoint_of(config, 9, 1.5)
        delete_old_checkpoints(Path(config.run_dir), 1, newer)
        checkpoint = rows[-1].weights.checkpoint
        assert checkpoint is not None
        drawn.append(weights_in(config, checkpoint))
        if len(drawn) == 1:
            raise KeyboardInterrupt
        for row in rows:
            shape = (config.evaluation.pictures_per_prompt, 4, 4, 3)
            pictures = torch.zeros(shape, dtype=torch.uint8)
            scores = {name: torch.zeros(len(pictures)) for name in config.rewards}
            records.add(row.name, [HeldoutPictures(n, t, pictures, scores, 0) for n, t in prompts])

    monkeypatch.setattr(evaluate_module, "_draw", draw)
    monkeypatch.setattr(evaluate_module, "_write", lambda *_: [])
    out = tmp_path / "out"
    asked: dict[str, Any] = {"checkpoints": ["base", "last"], "steps": [STEPS], "folder": out}
    with pytest.raises(KeyboardInterrupt):
        evaluate_module.evaluate(config, **asked)
    request = json.loads((out / "request.json").read_text())
    assert None not in request["rows"].values()
    assert "iteration_000005" in capsys.readouterr().out
    evaluate_module.evaluate(config, **asked)
    assert "iteration_000005, as when this evaluation began" in capsys.readouterr().out
    assert len(drawn) == 2
    for weights in drawn:
        assert all(torch.equal(weights[name], trained[name]) for name in trained)
    # All is drawn: nothing is kept, and the same command answers from the records.
    assert [path.name for path in (out / "weights").iterdir()] == ["last.json"]
    evaluate_module.evaluate(config, **asked)
    assert len(drawn) == 2
    with pytest.raises(EvaluationError, match="its weights are not there any more"):
        evaluate_module.evaluate(config, **(asked | {"steps": [STEPS + 1]}))
    # A base model that was replaced meanwhile is another row.
    monkeypatch.setattr(rows_module, "base_fingerprint", lambda _: "other")
    with pytest.raises(EvaluationError, match=f"other base-{STEPS}steps"):
        evaluate_module.evaluate(config, **asked)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("links", [True, False])
def test_pinned_weights_outlive_their_checkpoint(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refused)
    folder = checkpoint_folder(Path(config.run_dir), 5)
    expected = read_weights(folder)
    pin_weights(folder, tmp_path / "pin")
    shutil.rmtree(folder)
    found = read_weights(tmp_path / "pin")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(CheckpointError):
        pin_weights(folder, tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


@pytest.mark.usefixtures("trained")
def test_last_is_the_next_one_where_it_goes_while_it_is_read(config: Config) -> None:
    tried: list[str] = []

    def use(path: Path) -> str:
        tried.append(path.name)
        if len(tried) == 1:
            newer = checkpoint_of(config, 9, 1.5)
            delete_old_checkpoints(Path(config.run_dir), 1, newer)
        return str(read_info(path).iteration)

    assert while_it_is_there(config, "last", use)[1] == "9"
    assert tried == ["iteration_000005", "iteration_000009"]
    path = str(checkpoint_folder(Path(config.run_dir), 5))
    with pytest.raises(CheckpointError, match="not there"):
        while_it_is_there(config, path, read_info)
