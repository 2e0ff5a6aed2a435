"""Every command on a disk that is full or read-only: exit 1, one message, nothing half-written."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo_ray import cli
from g2rpo_ray.cli import main
from g2rpo_ray.cluster.private import PrivateRayError
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import DiskError
from g2rpo_ray.common.logs import log_file
from g2rpo_ray.config import Config
from g2rpo_ray.config.operation import TrackingSection
from g2rpo_ray.evaluation import evaluate
from g2rpo_ray.evaluation.records import Records
from g2rpo_ray.evaluation.rows import Row
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.learner.checkpoints.format import CheckpointError, prepare_checkpoint
from g2rpo_ray.models.saving import ADAPTER_FILE
from g2rpo_ray.prompts.encoder import ShardEncoder
from g2rpo_ray.rollout.answers import HeldoutPictures
from g2rpo_ray.run.scores import save_heldout
from g2rpo_ray.tiny_world import assets_dir
from g2rpo_ray.tracking.metrics import MetricsLog, read_metrics
from g2rpo_ray.tracking.report.page import write_report
from tests.disks import FILLER, fill, left, make_read_only, small_disk
from tests.states import make_run
from tests.tiny import CAPTIONS, QUICKSTART, tiny_config
from tests.tracking.fake_run import make_run as make_finished_run

LORA = "model.lora={rank: 4, alpha: 10.0}"
CPU = ["rollout.gpus_per_worker=0", "evaluation.steps=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    made = {"full": [], "lora": [LORA]}
    return {kind: make_run(tmp_path_factory.mktemp(kind), *more) for kind, more in made.items()}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


@pytest.fixture(params=["No space left on device", "Read-only file system"])
def spoil(request: pytest.FixtureRequest, disk: Path) -> Callable[[], str]:
    """Fills the disk but for 4 kB, or makes it read-only; the words for it."""

    def now() -> str:
        if request.param.startswith("No"):
            fill(disk, leave=4096)
        else:
            make_read_only(disk)
        return str(request.param)

    return now


def failure_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command says that fails with exit code 1."""
    assert main([str(argument) for argument in arguments]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    (message,) = (line for line in printed.splitlines() if line.startswith("g2rpo: "))
    return message


@pytest.mark.parametrize(
    ("kind", "options"), [("lora", []), ("lora", ["--merged"]), ("full", [])], ids=str
)
def test_export(
    runs: dict[str, Config],
    disk: Path,
    spoil: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: list[str],
) -> None:
    monkeypatch.setattr("g2rpo_ray.run.export.check_room", lambda *_: None)
    fault, out = spoil(), disk / "out"
    message = failure_of(capsys, "export", runs[kind].run_dir, "--to", out, *options)
    assert f"{out}: cannot be written: {fault}" in message
    assert not left(disk)


def test_export_asks_for_room_first(
    runs: dict[str, Config], disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = disk / "out"
    command = "export", runs["full"].run_dir, "--to", out, "model.dtype=bfloat16"
    for rounding, size in {"nearest": "3.7", "none": "7.5"}.items():
        message = failure_of(capsys, *command, "--rounding", rounding)
        assert f"{out}: the transformer takes {size} MB, and 1.0 MB are free there" in message
    assert not left(disk)
    # An adapter has room there.
    assert main(["export", str(runs["lora"].run_dir), "--to", str(out)]) == 0
    assert left(out) == {ADAPTER_FILE, "README.md"}


def test_sample_asks_for_room_first(
    runs: dict[str, Config], disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "sample", runs["full"].run_dir, "--out", disk / "out", "--prompt", "a cat", *CPU
    message = failure_of(capsys, *command, "--count", 100)
    what = "a folder of 100 PNG files of 64 x 64 pixels at their largest (fewer with --count)"
    assert f"{disk / 'out'}: {what} takes 1.6 MB, and 1.0 MB are free there" in message
    assert not left(disk)
    # What lies at the base model's switch has its room there, too.
    message = failure_of(capsys, *command, "--count", 60, "evaluation.steps=2", "--trained-steps=1")
    assert "at their largest, with the latents at the switch, (fewer" in message
    # Pictures that are drawn over take no more.
    (disk / "out").mkdir()
    for number in range(30):
        (disk / "out" / f"0_{number}.png").touch()
    message = failure_of(capsys, *command, "--count", 100)
    assert "a folder of 70 PNG files of 64 x 64 pixels" in message


def test_sample(
    runs: dict[str, Config],
    disk: Path,
    spoil: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("g2rpo_ray.evaluation.sample.check_room", lambda *_: None)
    out = disk / "out"
    out.mkdir()
    fault, prompts = spoil(), [f"--prompt={caption}" for caption in CAPTIONS]
    message = failure_of(
        capsys, "sample", runs["full"].run_dir, "--out", out, "--count", 2, *prompts, *CPU
    )
    assert f"cannot be written: {fault}" in message
    assert str(out) in message
    for name in left(disk):
        Image.open(disk / name).load()


def test_evaluate_asks_for_room_first(
    runs: dict[str, Config],
    disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(evaluate, "PINS", str(tmp_path / "pins"))
    monkeypatch.setattr(evaluate, "_draw", None)
    command = "evaluate", runs["full"].run_dir, "--out", disk / "out", *CPU
    # Of base and last, 2 prompts each.
    message = failure_of(capsys, *command, "evaluation.pictures_per_prompt=25")
    what = "a folder of 100 PNG files of 64 x 64 pixels at their largest"
    assert f"{disk / 'out'}: {what} (fewer with evaluation.prompts or" in message
    assert "evaluation.pictures_per_prompt) takes 1.6 MB, and 1.0 MB are free there" in message
    assert not left(disk)
    # Those of its rows are there; others' stay beside them.
    for row in ("base-1steps", "last-8steps"):
        (disk / "out" / "pictures" / row).mkdir(parents=True)
        for number in range(20):
            (disk / "out" / "pictures" / row / f"0_{number}.png").touch()
    (disk / "out" / "request.json").write_text("{}")
    message = failure_of(capsys, *command, "evaluation.pictures_per_prompt=25")
    assert "a folder of 80 PNG files of 64 x 64 pixels" in message


def noise(number: int) -> HeldoutPictures:
    pictures = torch.from_numpy(np.random.default_rng(number).integers(0, 256, (2, 64, 64, 3)))
    scores = {name: torch.ones(2) for name in ("clip", "hps", "oracle", "diversity")}
    return HeldoutPictures(number, f"prompt {number}", pictures.to(torch.uint8), scores, 0)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_evaluate(
    runs: dict[str, Config],
    disk: Path,
    spoil: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    at_the_end: bool,
) -> None:
    command = "evaluate", runs["full"].run_dir, "--out", disk / "out", *CPU
    message = failure_of(capsys, *command)
    assert f"{disk / 'out' / 'weights' / 'last'}: cannot be written: No space" in message
    assert not left(disk)
    # Elsewhere the weights have room.
    monkeypatch.setattr(evaluate, "PINS", str(tmp_path / "pins"))
    faults: list[str] = []

    def draw(_: Config, records: Records, rows: list[Row], prompts: list[tuple[int, str]]) -> None:
        drawn = [(row.name, noise(number)) for row in rows for number, _ in prompts]
        for place, (row, result) in enumerate(drawn):
            if place == 1 and not (at_the_end or faults):
                faults.append(spoil())
            records.add(row, [result])
        if not faults:
            faults.append(spoil())

    monkeypatch.setattr(evaluate, "_draw", draw)
    message = failure_of(capsys, *command)
    assert f"cannot be written: {faults[0]}" in message
    assert str(disk / "out") in message
    assert not {name for name in left(disk / "out") if name.endswith((".tmp", ".html", ".md"))}
    if faults[0].startswith("No"):
        # With room again the same command ends.
        (disk / FILLER).unlink()
        assert main([str(argument) for argument in command]) == 0


def test_embed_asks_for_room_first(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(f"a cat {n}" for n in range(2000)))
    out = disk / "out"
    message = failure_of(capsys, "embed", QUICKSTART, tmp_path / "prompts.txt", "--out", out)
    assert f"{out}: embeddings of 2000 prompts (fewer with --limit," in message
    assert "are free there" in message


def test_embed(disk: Path, spoil: Callable[[], str]) -> None:
    encode = ShardEncoder(tiny_config(disk / "unused"), disk, 0)
    fault = spoil()
    with pytest.raises(DiskError, match=f"shard_00003.safetensors: cannot be written: {fault}"):
        encode({"shard": 3, "texts": CAPTIONS})
    assert not left(disk)


def test_embed_cannot_begin(
    disk: Path, spoil: Callable[[], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = spoil()
    (tmp_path / "prompts.txt").write_text("a cat")
    if fault.startswith("No"):
        fill(disk, leave=0)
    message = failure_of(capsys, "embed", QUICKSTART, tmp_path / "prompts.txt", "--out", disk / "o")
    assert f"cannot be written: {fault}" in message
    assert not left(disk)


def test_train_asks_for_room_first(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, heldout = disk / "run", tmp_path / "heldout.txt"
    # Without embeddings beside it.
    heldout.write_bytes((assets_dir() / "prompts" / "heldout.txt").read_bytes())
    message = failure_of(
        capsys, "train", QUICKSTART, f"run_dir={run_dir}", "model.lora=null",
        f"prompts.heldout={heldout}",
    )  # fmt: skip
    what = "a checkpoint with embeddings of 128 held-out prompts"
    assert f"{run_dir}: {what} takes" in message
    assert not run_dir.exists()


def test_train_cannot_begin(
    disk: Path,
    spoil: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("g2rpo_ray.training.session.check_room", lambda *_: None)
    fault = spoil()
    if fault.startswith("No"):
        fill(disk, leave=0)
    message = failure_of(capsys, "train", QUICKSTART, f"run_dir={disk / 'run'}")
    assert f"cannot be written: {fault}" in message
    assert left(disk) <= {"run/.lock"}


def test_a_checkpoint_asks_for_room_first(disk: Path) -> None:
    folder = checkpoint_folder(disk, 1)
    with pytest.raises(DiskError, match=r"a checkpoint takes 9\.0 MB, and 1\.0 MB are free"):
        prepare_checkpoint(folder, 9_000_000)
    assert not list(folder.parent.iterdir())


def test_a_report_keeps_the_one_before(disk: Path, spoil: Callable[[], str]) -> None:
    run_dir = make_finished_run(disk / "run", iterations=10)
    before = write_report(run_dir).read_text()
    (run_dir / "summary.json").unlink()
    with pytest.raises(DiskError, match=rf"report\.html: cannot be written: {spoil()}"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_text() == before
    assert not {name for name in left(disk) if name.endswith(".tmp")}


def test_pictures_of_a_run(disk: Path, spoil: Callable[[], str]) -> None:
    with pytest.raises(DiskError, match=f"cannot be written: {spoil()}"):
        save_heldout(disk, 3, [noise(number) for number in range(5)])
    assert not [name for name in left(disk) if not name.endswith(".png")]


def test_numbers_of_a_run(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that TensorBoard's own thread writes: no hang, and no traceback of it."""
    unseen: list[object] = []
    monkeypatch.setattr(threading, "__excepthook__", unseen.append)
    monkeypatch.setattr(threading, "excepthook", cli._in_a_thread)
    picture = np.asarray(noise(0).pictures[0])

    def show(log: MetricsLog) -> None:
        for number in range(20):
            log.pictures(1, {f"picture {number}": picture})

    with MetricsLog(disk / "run", TrackingSection(tensorboard=True), {}) as log:
        log.record(1, {"weight_version": 1})
        fill(disk, leave=0)
        with pytest.raises(DiskError, match="run/tensorboard: cannot be written: No space left"):
            show(log)
    assert not unseen
    (disk / FILLER).unlink()
    assert [line["iteration"] for line in read_metrics(disk / "run")][:1] == [1]


def test_a_log_that_has_no_room_prints_no_tracebacks(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_file(disk / "log.jsonl"):
        fill(disk, leave=0)
        for _ in range(200):
            logging.getLogger("a test").warning("a line %s", "x" * 100)
    assert capsys.readouterr().err == ""


def test_an_error_without_a_name_is_recognised_where_commands_end(
    runs: dict[str, Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr("g2rpo_ray.run.export.export", fail)
    message = failure_of(capsys, "export", runs["full"].run_dir, "--to", "unused")
    assert message == "g2rpo: Error while serializing: No space left on device (os error 28)"


@pytest.mark.parametrize("error_class", [InputError, CheckpointError, PrivateRayError])
@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 1), (errno.EROFS, 1), (errno.EACCES, 2)]
)
def test_a_disk_is_no_bad_input_whoever_names_it(
    monkeypatch: pytest.MonkeyPatch, error_class: type[InputError], number: int, code: int
) -> None:
    def fail(_: object) -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            given = ("cannot be used", "free some") if error_class is PrivateRayError else ("no",)
            raise error_class(*given) from error

    monkeypatch.setattr("g2rpo_ray.commands.plan.run", fail)
    assert cli.main(["plan", "run.yaml"]) == code
