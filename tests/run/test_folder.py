"""The run folder: what opening, resuming and mixing runs does, and what it says."""

import fcntl
import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g2rpo_ray.common.files import DiskError
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.learner.checkpoints.folders import SNAPSHOTS, checkpoint_folder
from g2rpo_ray.learner.checkpoints.format import CheckpointError, CheckpointInfo, read_info
from g2rpo_ray.models.fingerprint import base_file_fingerprint, base_fingerprint
from g2rpo_ray.rollout.answers import HeldoutPictures
from g2rpo_ray.run.folder import _LOCKS, begin_life, changed_settings, open_run, write_resolved
from g2rpo_ray.run.paths import RunFolderError
from g2rpo_ray.run.scores import fallen_most, save_heldout
from g2rpo_ray.run.weights import checkpoint_named, trained_kind, while_it_is_there
from g2rpo_ray.tracking.report.page import write_report
from tests.states import write_checkpoint
from tests.tiny import copy_flux, reshard, tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def config_of(folder: Path, *overrides: str) -> Config:
    return tiny_config(folder, "iterations=10", *overrides)


def start(folder: Path, *overrides: str) -> Config:
    """A run that has recorded something in the folder."""
    config = config_of(folder, *overrides)
    open_run(config, "none")
    (folder / "metrics.jsonl").write_text('{"iteration": 0, "kind": "evaluation"}\n')
    return config


def save(config: Config, iteration: int, kind: str = "") -> Path:
    target = checkpoint_folder(Path(config.run_dir) / kind, iteration)
    info = CheckpointInfo(
        iteration, iteration, 3 * iteration, 100, 1.0, trained_kind(config.model), config.seed
    )
    write_checkpoint(target, info, {"weight.a": torch.ones(2), "exp_avg.a": torch.ones(2)})
    return target


def error_of(config: Config, resume: str) -> str:
    with pytest.raises(RunFolderError) as caught:
        open_run(config, resume)
    return str(caught.value)


def test_a_new_run_starts_at_the_base_model(folder: Path) -> None:
    config = config_of(folder)
    run = open_run(config, "none")
    assert (run.folder, run.checkpoint, run.first_record) == (folder, None, None)
    assert (run.info.iteration, run.info.updates, run.info.weight_version) == (0, 0, 0)
    assert load_config(folder / "config.yaml") == config
    versions = json.loads((folder / "versions.json").read_text())
    assert {"python", "torch", "ray", "deepspeed"} <= versions.keys()


def test_a_folder_that_has_a_run_says_what_resume_does(folder: Path) -> None:
    config = start(folder)
    message = error_of(config, "none")
    assert f"run_dir {folder} already has a run" in message
    assert "--resume auto continues it from its last checkpoint" in message
    assert "another run_dir" in message


def test_a_start_that_failed_before_the_first_record_may_be_made_again(folder: Path) -> None:
    open_run(config_of(folder, "rollout.workers=9"), "none")
    run = open_run(config_of(folder), "none")
    assert (run.checkpoint, run.first_record) == (None, None)
    save(config_of(folder), 1, SNAPSHOTS)
    assert f"run_dir {folder} already has a run" in error_of(config_of(folder), "none")


def test_a_folder_that_another_driver_trains_in_is_refused_and_left_alone(folder: Path) -> None:
    folder.mkdir()
    with (folder / ".lock").open("w") as other:
        other.write(f"process 7 on {socket.gethostname()}")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        message = error_of(config_of(folder), "none")
        assert f"run_dir {folder}: process 7 on {socket.gethostname()} trains in it" in message
        assert [path.name for path in folder.iterdir()] == [".lock"]
    open_run(config_of(folder), "none")
    assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    with (folder / ".lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_waits_for_the_lock_of_a_host_that_died(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    with (folder / ".lock").open("w") as other:
        other.write("process 7 on there")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr("g2rpo_ray.run.folder.LOCK_WAIT_S", 0.0)
        assert "process 7 on there trains in it" in error_of(config_of(folder), "none")
        monkeypatch.setattr("g2rpo_ray.run.folder.LOCK_WAIT_S", 1000.0)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(other, fcntl.LOCK_UN))
        open_run(config_of(folder), "none")
    assert "process 7 on there has it" in caplog.text


def test_a_run_that_waited_goes_on_from_the_last_state_of_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(start(folder), 1, SNAPSHOTS)
    _LOCKS.pop(folder).close()  # as if this process had ended
    with (folder / ".lock").open("w") as other:
        other.write("process 7 on there")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)

        def end(_: float) -> None:
            save(config_of(folder), 2, SNAPSHOTS)
            fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr("time.sleep", end)
        run = open_run(config_of(folder), "auto")
    assert run.checkpoint is not None
    assert run.checkpoint.name.endswith("2")


def test_a_full_disk_leaves_the_settings_of_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = start(folder)

    def full(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        if "config.yaml" in name.name:
            os.truncate(name, 10)
            raise OSError(28, "No space left on device", str(name))

    monkeypatch.setattr("os.fsync", full)
    run = open_run(mistyped := config_of(folder, "learner.learning_rate=1e-5"), "auto")
    with pytest.raises(DiskError, match=r"config\.yaml: cannot be written: No space left on dev"):
        begin_life(run, mistyped)
    assert load_config(folder / "config.yaml") == config


def test_a_resume_that_fails_leaves_the_settings_of_the_life_before(folder: Path) -> None:
    config = start(folder)
    save(config, 2)
    mistyped = config_of(folder, "learner.learning_rate=1e-1")
    open_run(mistyped, "auto")  # and no role starts
    assert load_config(folder / "config.yaml") == config
    assert changed_settings(folder, mistyped) == [
        f"learner.learning_rate: {config.learner.learning_rate} -> 0.1"
    ]


def test_the_settings_of_each_life_are_kept(folder: Path) -> None:
    lives = [start(folder), *(config_of(folder, f"sampling.eta={eta}") for eta in (0.5, 0.6, 0.9))]
    older = save(lives[0], 2)
    begin_life(open_run(lives[1], "auto"), lives[1])
    save(lives[1], 4)
    begin_life(open_run(lives[2], "auto"), lives[2])
    kept = {path.stem[-1]: load_config(path) for path in (folder / "settings").iterdir()}
    assert kept == {"0": lives[0], "2": lives[1], "4": lives[2]}
    assert load_config(folder / "config.yaml") == lives[2]
    # What came after the older checkpoint is given up, its settings too.
    begin_life(open_run(lives[3], str(older)), lives[3])
    kept = {path.stem[-1]: load_config(path) for path in (folder / "settings").iterdir()}
    assert kept == {"0": lives[0], "2": lives[3]}


def test_a_refused_folder_is_left_as_it_was(folder: Path) -> None:
    start(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    error_of(config_of(folder, "seed=5"), "none")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "inside",
    [
        "checkpoints",
        "checkpoints/mine",
        "checkpoints/iteration_000003",
        "checkpoints/iteration_000003/mine",
        "snapshots/checkpoints/mine",
        "link/mine",
        "copy/mine",
    ],
)
def test_a_run_among_the_states_of_another_is_refused(folder: Path, inside: str) -> None:
    """Which would be deleted with them."""
    state = save(start(folder), 3)
    (folder / "link").symlink_to(state)
    (folder / "copy").mkdir()
    for file in state.iterdir():
        (folder / "copy" / file.name).write_bytes(file.read_bytes())
    before = sorted(folder.rglob("*"))
    message = error_of(config_of(folder / inside), "none")
    with pytest.raises(RunFolderError):
        write_resolved(config_of(folder / inside))
    how = "lies in" if "mine" in inside else "is"
    assert f"run_dir {folder / inside}: {how} {folder}" in message
    assert message.endswith(
        "name a folder outside of checkpoints and of a run's checkpoints and snapshots"
    )
    assert sorted(folder.rglob("*")) == before


def test_a_run_beside_the_states_of_another_is_none_of_theirs(folder: Path) -> None:
    start(folder)
    # As a folder for runs may be named, beside the settings that they are made from.
    own = folder.parent / "project"
    (own / "checkpoints").mkdir(parents=True)
    (own / "config.yaml").write_text("")
    (own / "state.json").write_text("{}")
    for place in (folder / "next", own / "checkpoints" / "run"):
        assert open_run(config_of(place), "none").folder == place


def test_a_dry_run_does_not_count_as_a_run(folder: Path) -> None:
    config = config_of(folder)
    write_resolved(config)
    assert open_run(config, "none").checkpoint is None


def test_auto_starts_anew_in_an_empty_folder(folder: Path) -> None:
    run = open_run(config_of(folder), "auto")
    assert (run.checkpoint, run.info.iteration, run.first_record) == (None, 0, None)
    told = f"found no checkpoint and no snapshot in {folder}: starts anew"
    assert run.where_it_starts() == told


def test_auto_before_the_first_checkpoint_drops_what_was_recorded(folder: Path) -> None:
    run = open_run(start(folder), "auto")
    assert (run.checkpoint, run.info.iteration, run.first_record) == (None, 0, 0)
    assert run.where_it_starts().endswith("starts anew, and makes anew what it has recorded")


def test_auto_takes_the_last_checkpoint(folder: Path) -> None:
    config = start(folder)
    save(config, 2)
    last = save(config, 4)
    run = open_run(config, "auto")
    assert (run.checkpoint, run.info.iteration, run.first_record) == (last, 4, 5)
    assert run.info.updates == 12
    assert run.where_it_starts() == f"goes on after iteration 4, from {last}"


def test_a_path_takes_that_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = start(folder)
    older = save(config, 2)
    save(config, 4)
    monkeypatch.chdir(folder)
    run = open_run(config, f"checkpoints/{older.name}")
    assert (run.checkpoint, run.info.iteration, run.first_record) == (older, 2, 3)


def test_auto_never_returns_to_the_history_that_a_path_gave_up(folder: Path) -> None:
    config = start(folder)
    chosen = save(config, 2)
    given_up = [save(config, 4), save(config, 3, SNAPSHOTS), save(config, 5, SNAPSHOTS)]
    for iteration in (2, 4):
        picture = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
        save_heldout(folder, iteration, [HeldoutPictures(7, "a bear", picture, {}, 1)])
    begin_life(open_run(config, str(chosen)), config)
    assert not any(state.exists() for state in given_up)
    assert open_run(config, "auto").checkpoint == chosen
    newer = save(config, 3, SNAPSHOTS)
    run = open_run(config, "auto")
    assert (run.checkpoint, run.first_record) == (newer, 4)
    shown = sorted(path.name for path in (folder / "pictures/heldout").iterdir())
    assert shown == ["iteration_2", "iteration_2.json"]


def test_auto_itself_gives_nothing_up(folder: Path) -> None:
    config = start(folder)
    states = [save(config, 2), save(config, 4), save(config, 5, SNAPSHOTS)]
    begin_life(open_run(config, "auto"), config)
    assert all(state.exists() for state in states)


def test_a_folder_that_only_resembles_a_checkpoint_is_none(folder: Path) -> None:
    config = start(folder)
    state = save(config, 2)
    state.with_name("iteration_000009_backup").mkdir()
    assert open_run(config, "auto").checkpoint == state


def test_a_path_into_another_run_starts_a_new_folder_from_it(folder: Path, tmp_path: Path) -> None:
    checkpoint = save(start(tmp_path / "earlier"), 3)
    run = open_run(config_of(folder), str(checkpoint))
    assert (run.folder, run.info.iteration, run.first_record) == (folder, 3, None)


def test_a_path_that_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        open_run(config_of(folder), str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        open_run(config_of(folder), "atuo")
    assert "--resume atuo: no such folder; it takes auto, none, or a folder" in str(caught.value)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (["model.lora.rank=4"], []),
        ([], ["model.lora.rank=4"]),
        (["model.lora.rank=4"], ["model.lora.rank=8"]),
        (["model.lora.rank=4"], ["model.lora.rank=4", "model.lora.alpha=3"]),
    ],
)
def test_weights_of_another_kind_are_named(
    folder: Path, saved: list[str], wanted: list[str]
) -> None:
    checkpoint = save(start(folder, *saved), 2)
    config = config_of(folder, *wanted)
    message = error_of(config, "auto")
    assert str(checkpoint) in message
    assert f"'{trained_kind(config_of(folder, *saved).model)}'" in message
    assert f"'{trained_kind(config.model)}'" in message
    assert "model.lora" in message


def test_kinds_are_named_with_rank_and_scale(folder: Path) -> None:
    assert trained_kind(config_of(folder).model) == "full"
    lora = config_of(folder, "model.lora.rank=4", "model.lora.alpha=8").model
    assert trained_kind(lora) == "lora rank 4 alpha 8"


def test_another_base_model_is_named(folder: Path, tmp_path: Path) -> None:
    lora = "model.lora={rank: 4, alpha: 8.0}"
    config = start(folder, lora)
    begun = open_run(config, "auto").info
    checkpoint = checkpoint_folder(folder, 2)
    write_checkpoint(checkpoint, replace(begun, iteration=2), {"weight.a": torch.ones(2)})
    moved = copy_flux(tmp_path / "flux")
    assert open_run(config_of(folder, lora, f"model.path={moved}"), "auto").info.base == begun.base
    weights = moved / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    save_file(tensors | {name: tensors[name] * 2}, weights)
    message = error_of(config_of(folder, lora, f"model.path={moved}"), "auto")
    assert f"{checkpoint} was trained from the base model {begun.base}, and model.path" in message
    assert base_fingerprint(config_of(folder, f"model.path={moved}").model) in message


def test_the_same_base_in_other_shards_is_the_same_base(folder: Path, tmp_path: Path) -> None:
    config = start(folder)
    begun = open_run(config, "auto").info
    checkpoint = checkpoint_folder(folder, 2)
    write_checkpoint(checkpoint, replace(begun, iteration=2), {"weight.a": torch.ones(2)})
    moved = copy_flux(tmp_path / "flux")
    reshard(moved / "transformer", "diffusion_pytorch_model")
    assert open_run(config_of(folder, f"model.path={moved}"), "auto").info.base == begun.base


def test_a_checkpoint_with_a_fingerprint_of_files_resumes(folder: Path, tmp_path: Path) -> None:
    config = start(folder)
    begun = open_run(config, "auto").info
    checkpoint, older = checkpoint_folder(folder, 2), base_file_fingerprint(config.model)
    assert older != begun.base
    info = replace(begun, iteration=2, base=older)
    write_checkpoint(checkpoint, info, {"weight.a": torch.ones(2)})
    # The next checkpoint is written with what this one is read as.
    assert open_run(config, "auto").info.base == begun.base
    moved = copy_flux(tmp_path / "flux")
    reshard(moved / "transformer", "diffusion_pytorch_model")
    message = error_of(config_of(folder, f"model.path={moved}"), "auto")
    assert "older checkpoint's fingerprint of files: with a copy of the very files" in message


def test_another_seed_is_named(folder: Path) -> None:
    checkpoint = save(start(folder), 2)
    message = error_of(config_of(folder, "seed=9"), "auto")
    assert f"{checkpoint} belongs to seed 0, the configuration has seed 9" in message


def test_a_complete_run_says_how_to_go_on(folder: Path) -> None:
    config = start(folder)
    save(config, 10)
    (folder / "summary.json").write_text(json.dumps({"iterations": 10}))
    message = error_of(config, "auto")
    assert "iteration 10 of 10: the run is complete; raise iterations" in message
    assert open_run(config_of(folder, "iterations=12"), "auto").info.iteration == 10


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_damaged_checkpoint_is_refused_when_the_run_is_opened(folder: Path, resume: str) -> None:
    config = start(folder)
    newest = save(config, 2)
    weights = next(newest.glob("trainable-*"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{weights}: damaged .*; name another checkpoint"):
        open_run(config, "auto" if resume == "auto" else str(newest))
    weights.unlink()
    with pytest.raises(CheckpointError, match=f"{weights}: missing"):
        open_run(config, "auto" if resume == "auto" else str(newest))


@pytest.mark.parametrize("content", [b"", b"[]", b'{"iterations": null}', b"\xff"])
def test_a_damaged_summary_says_what_to_do(folder: Path, content: bytes) -> None:
    config = start(folder)
    save(config, 10)
    (folder / "summary.json").write_bytes(content)
    message = error_of(config, "auto")
    assert f"{folder}/summary.json: not readable as a run's summary" in message
    assert "; remove it: a run that is at its last iteration then" in message
    (folder / "summary.json").unlink()
    assert open_run(config, "auto").info.iteration == 10


def test_a_prolonged_run_does_not_show_the_summary_of_its_earlier_life(folder: Path) -> None:
    config = start(folder)
    save(config, 10)
    (folder / "summary.json").write_text(json.dumps({"iterations": 10, "train_s": 60.0}))
    error_of(config, "auto")
    longer = config_of(folder, "iterations=12")
    run = open_run(longer, "auto")
    assert (folder / "summary.json").exists(), "kept until everything has started"
    begin_life(run, longer)
    assert "There is no summary.json" in write_report(folder).read_text()


def test_a_run_that_lacks_only_its_last_evaluation_is_finished(folder: Path) -> None:
    config = start(folder)
    save(config, 10)
    assert open_run(config, "auto").info.iteration == 10


def test_a_prolonged_run_that_lacks_only_its_last_evaluation_is_finished(folder: Path) -> None:
    start(folder)
    (folder / "summary.json").write_text(json.dumps({"iterations": 10}))
    longer = config_of(folder, "iterations=12")
    save(longer, 12)
    assert open_run(longer, "auto").info.iteration == 12


def test_a_checkpoint_beyond_the_end_is_refused(folder: Path) -> None:
    config = start(folder)
    save(config, 10)
    message = error_of(config_of(folder, "iterations=8"), "auto")
    assert "iteration 10, beyond iterations=8" in message


def test_changed_settings_are_listed_with_old_and_new_value(folder: Path) -> None:
    start(folder, "learner.learning_rate=1e-4")
    config = config_of(folder, "learner.learning_rate=2e-4", "model.lora.rank=4")
    assert changed_settings(folder, config) == [
        "learner.learning_rate: 0.0001 -> 0.0002",
        "model.lora.alpha: None -> 128.0",
        "model.lora.rank: None -> 4",
    ]


def test_a_changed_batch_says_what_becomes_of_the_prompt_order(folder: Path) -> None:
    start(folder)
    [change] = changed_settings(folder, config_of(folder, "sampling.prompts_per_iteration=5"))
    assert change.startswith("sampling.prompts_per_iteration: 2 -> 5 (an iteration has other")


def test_unchanged_settings_and_an_empty_folder_list_nothing(folder: Path) -> None:
    assert changed_settings(folder, config_of(folder)) == []
    assert changed_settings(folder, start(folder)) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = error_of(config_of(tmp_path / "file" / "run"), "none")
    assert f"run_dir {tmp_path}/file/run: cannot be written" in message


def test_named_checkpoints(folder: Path) -> None:
    config = start(folder)
    with pytest.raises(RunFolderError, match="no checkpoint there yet"):
        checkpoint_named(config, "last")
    first, last = save(config, 2), save(config, 4)
    assert checkpoint_named(config, "last") == last
    assert checkpoint_named(config, str(first)) == first
    # The folder of a run, of this one or of another.
    assert checkpoint_named(config_of(folder.with_name("another")), str(folder)) == last
    shutil.rmtree(last)
    shutil.rmtree(first)
    with pytest.raises(RunFolderError, match=f"{folder}: no checkpoint there yet"):
        checkpoint_named(config_of(folder.with_name("another")), str(folder))


@pytest.mark.parametrize("name", ["5", "file", "empty"])
def test_what_is_no_checkpoint_is_named_once(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        while_it_is_there(config_of(folder), str(tmp_path / name), read_info)
    assert str(caught.value).count(str(tmp_path)) == 1
    assert "a run has" in str(caught.value)


def test_heldout_pictures_are_kept_with_their_scores(folder: Path) -> None:
    pictures = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    scores = {"clip": torch.tensor([0.5, torch.nan])}
    save_heldout(folder, 4, [HeldoutPictures(7, "ein Bär 🐻", pictures, scores, 1)])
    entries = json.loads((folder / "pictures/heldout/iteration_4.json").read_text())
    assert [entry["scores"] for entry in entries] == [{"clip": 0.5}, {"clip": None}]
    assert entries[1]["prompt"] == "ein Bär 🐻"
    assert all((folder / "pictures/heldout" / entry["file"]).is_file() for entry in entries)


@pytest.mark.parametrize("content", [b"", b"{}", b'[{"scores": {}}, 3]', b"\xff"])
def test_a_damaged_list_of_pictures_ends_no_run(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pictures = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    results = [HeldoutPictures(7, "a bear", pictures, {"hps": torch.tensor([0.5])}, 1)]
    for iteration in (4, 8):
        save_heldout(folder, iteration, results)
    first = folder / "pictures" / "heldout" / "iteration_4.json"
    better = json.loads(first.read_text())
    better[0]["scores"]["hps"] = 0.75
    first.write_text(json.dumps(better))
    assert fallen_most(folder, "hps", results, 3) == {7: 0.25}
    first.write_bytes(content)
    assert fallen_most(folder, "hps", results, 3) == {}
    if content != b"{}":
        assert f"{first}: not readable as a list of pictures" in caplog.text
