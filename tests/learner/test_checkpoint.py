"""Checkpoints: whole or not at all, and nothing damaged is ever read."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from g2rpo_ray.common.files import DiskError
from g2rpo_ray.learner.checkpoints import format as checkpoint
from g2rpo_ray.learner.checkpoints.fence import UNFENCED
from g2rpo_ray.learner.checkpoints.folders import (
    SNAPSHOTS,
    checkpoint_folder,
    delete_old_checkpoints,
    iteration_of,
    list_checkpoints,
)
from g2rpo_ray.learner.checkpoints.format import (
    FORMAT,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    CheckpointInfo,
    check_whole,
    commit_checkpoint,
    open_checkpoint,
    prepare_checkpoint,
    read_info,
    read_weights,
    weights_checksum,
    write_rank,
)
from g2rpo_ray.learner.checkpoints.parts import StatePart
from g2rpo_ray.learner.worker import Learner
from tests.disks import make_read_only, small_disk, unreadable
from tests.states import whole_parts, write_checkpoint
from tests.tiny import equal_weights, tiny_config

FILES = [WEIGHTS_FILE.format(0), OPTIMIZER_FILE.format(0)]


def info_of(iteration: int) -> CheckpointInfo:
    return CheckpointInfo(iteration, iteration, 3 * iteration, 500, 12.5, "full", 7)


def state_of(value: float) -> dict[str, Tensor]:
    return {
        "weight.a.b": torch.full((64, 32), value),
        "exp_avg.a.b": torch.full((64, 32), value / 3),
        "exp_avg_sq.a.b": torch.full((64, 32), value / 7),
    }


def write(run_dir: Path, iteration: int, value: float = 1.0) -> Path:
    folder = checkpoint_folder(run_dir, iteration)
    write_checkpoint(folder, info_of(iteration), state_of(value))
    return folder


def read_checkpoint(folder: Path) -> tuple[CheckpointInfo, dict[str, Tensor]]:
    info, reader = open_checkpoint(folder)
    return info, dict(reader)


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    return str(caught.value)


def is_whole(folder: Path, value: float) -> bool:
    return equal_weights(read_checkpoint(folder)[1], state_of(value))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Room for two checkpoints."""
    with small_disk(tmp_path / "disk", "96k") as folder:
        yield folder


def test_what_was_written_is_read_back_to_the_bit(tmp_path: Path) -> None:
    folder = write(tmp_path, 12)
    info, state = read_checkpoint(folder)
    assert info == read_info(folder) == info_of(12)
    assert equal_weights(state, state_of(1.0))
    assert equal_weights(read_weights(folder), {"a.b": state_of(1.0)["weight.a.b"]})


def test_only_tensors_and_json_are_on_the_disk(tmp_path: Path) -> None:
    folder = write(tmp_path, 12)
    assert {path.name for path in folder.iterdir()} == {"state.json", *FILES}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


BOTH_OPTIONS = "(train: --resume PATH, other commands: --checkpoint PATH)"


@pytest.mark.parametrize("file", FILES)
def test_cut_short(tmp_path: Path, file: str) -> None:
    path = write(tmp_path, 1) / file
    path.write_bytes(path.read_bytes()[:-1])
    message = error_of(path.parent)
    assert f"{path}: damaged" in message
    assert BOTH_OPTIONS in message


def test_one_changed_bit(tmp_path: Path) -> None:
    path = write(tmp_path, 1) / FILES[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert f"{path}: damaged" in error_of(path.parent)
    with pytest.raises(CheckpointError, match="damaged"):
        read_weights(path.parent)


@pytest.mark.parametrize("file", FILES)
def test_missing_file(tmp_path: Path, file: str) -> None:
    path = write(tmp_path, 1) / file
    path.unlink()
    message = error_of(path.parent)
    assert f"{path}: missing; the checkpoint is incomplete" in message
    assert BOTH_OPTIONS in message


def test_missing_folder(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'}: no checkpoint there" in error_of(tmp_path / "none")


def test_a_runs_folder_in_place_of_a_checkpoints(tmp_path: Path) -> None:
    assert "a run has them in checkpoints/" in error_of(write(tmp_path, 1).parent.parent)


@pytest.mark.parametrize("text", ["", "{", '{"format": 1', "\x00\x01"])
def test_description_cut_short(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 1) / "state.json"
    path.write_text(text)
    message = error_of(path.parent)
    assert f"{path}: not readable" in message
    assert BOTH_OPTIONS in message


@pytest.mark.parametrize("content", [[], {}, {"format": 1}, {"format": "2"}])
def test_other_format(tmp_path: Path, content: object) -> None:
    path = write(tmp_path, 1) / "state.json"
    path.write_text(json.dumps(content))
    found = content.get("format") if isinstance(content, dict) else None
    message = error_of(path.parent)
    assert f"{path}: a checkpoint of format {found}, this version reads {FORMAT}" in message
    with pytest.raises(CheckpointError, match="of format"):
        read_info(path.parent)


@pytest.mark.parametrize("key", ["files", "iteration", "trained"])
def test_description_that_lacks_an_entry(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, 1) / "state.json"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    message = error_of(path.parent)
    assert str(path) in message
    assert key in message
    assert BOTH_OPTIONS in message


def test_description_with_an_unknown_entry(tmp_path: Path) -> None:
    path = write(tmp_path, 1) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mood": "good"}))
    assert "mood" in error_of(path.parent)


@pytest.mark.parametrize("files", [{}, {FILES[0]: ""}, [FILES[0]], 2, None])
def test_description_of_other_files(tmp_path: Path, files: object) -> None:
    path = write(tmp_path, 1) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))
    message = error_of(path.parent)
    assert str(path) in message
    assert BOTH_OPTIONS in message


def test_full_disk_names_the_cause_and_keeps_the_last_good_one(disk: Path) -> None:
    good = write(disk, 1)
    write(disk, 2)
    with pytest.raises(DiskError) as caught:
        write(disk, 3)
    assert "checkpoint not written" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert is_whole(good, 1.0)
    assert list_checkpoints(disk) == [good, checkpoint_folder(disk, 2)]
    assert not list(good.parent.glob(".*"))


def fail(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["write_parts", "sha256_of_file", "flush"])
def test_a_failure_at_any_step_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder = write(tmp_path, 5, value=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, step, fail)
        with pytest.raises(DiskError) as caught:
            write(tmp_path, 5, value=2.0)
    assert str(folder) in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert is_whole(folder, 1.0)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_the_disk_garbles_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, 5, value=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "equals_file", lambda *_: False)
        with pytest.raises(DiskError) as caught:
            write(tmp_path, 5, value=2.0)
    assert f"{folder}: checkpoint not written: learner rank 0: what was read back of" in str(
        caught.value
    )
    assert is_whole(folder, 1.0)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_checkpoint_of_the_same_iteration_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 5, value=1.0)
    assert is_whole(write(tmp_path, 5, value=2.0), 2.0)


def test_read_only_disk_names_the_cause_and_keeps_the_last_good_one(disk: Path) -> None:
    good = write(disk, 1)
    make_read_only(disk)
    with pytest.raises(DiskError, match="Read-only file system"):
        write(disk, 2)
    assert is_whole(good, 1.0)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, 1)
    assert str(checkpoint_folder(tmp_path, 1)) in str(caught.value)


def test_a_left_over_of_a_killed_write_is_no_checkpoint(tmp_path: Path) -> None:
    good = write(tmp_path, 1)
    left_over = good.with_name(".iteration_000002.0.writing")
    left_over.mkdir()
    (left_over / FILES[0]).write_bytes(b"half")
    assert list_checkpoints(tmp_path) == [good]
    assert is_whole(write(tmp_path, 2), 1.0)
    assert not left_over.exists()


def test_the_last_ones_are_kept_in_the_order_of_iterations(tmp_path: Path) -> None:
    folders = [write(tmp_path, iteration) for iteration in (5, 10, 100, 20)]
    delete_old_checkpoints(tmp_path, keep_last=2, newest=folders[2])
    assert list_checkpoints(tmp_path) == [folders[3], folders[2]]


def test_checkpoints_of_an_abandoned_future_go_and_the_new_one_stays(tmp_path: Path) -> None:
    """After --resume of an older checkpoint, the later ones belong to another history."""
    old, new, abandoned = (write(tmp_path, iteration) for iteration in (10, 12, 30))
    delete_old_checkpoints(tmp_path, keep_last=2, newest=new)
    assert list_checkpoints(tmp_path) == [old, new]
    assert not abandoned.exists()


def test_fewer_than_are_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    delete_old_checkpoints(tmp_path, keep_last=3, newest=folder)
    assert list_checkpoints(tmp_path) == [folder]


def parts_of(value: float, ranks: int) -> list[list[StatePart]]:
    """A state's parts on several ranks, cut without regard to the tensors' rows."""
    parts: list[list[StatePart]] = [[] for _ in range(ranks)]
    for part in whole_parts(state_of(value)):
        start = 0
        for rank, data in enumerate(part.data.tensor_split(ranks)):
            parts[rank].append(StatePart(part.key, part.shape, start, data))
            start += len(data)
    return parts


def write_on_ranks(run_dir: Path, iteration: int, ranks: int, value: float = 1.0) -> Path:
    folder = checkpoint_folder(run_dir, iteration)
    prepare_checkpoint(folder)
    for rank, parts in enumerate(parts_of(value, ranks)):
        write_rank(folder, rank, parts)
    commit_checkpoint(folder, info_of(iteration), ranks, timeout_s=0)
    return folder


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_ranks_wrote_is_one_state(tmp_path: Path, ranks: int) -> None:
    folder = write_on_ranks(tmp_path, 4, ranks)
    assert len(list(folder.iterdir())) == 1 + 2 * ranks
    assert is_whole(folder, 1.0)
    _, reader = open_checkpoint(folder)
    whole = state_of(1.0)["weight.a.b"].flatten()
    for start, stop in ((0, 2048), (1, 2), (683, 1365), (1000, 2048), (5, 5)):
        assert torch.equal(reader.read("weight.a.b", start, stop), whole[start:stop])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_on_ranks(tmp_path, 4, 3)
    (folder / WEIGHTS_FILE.format(1)).unlink()
    assert f"{folder / WEIGHTS_FILE.format(1)}: missing" in error_of(folder)


def test_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, 1)
    prepare_checkpoint(folder)
    write_rank(folder, 0, parts_of(1.0, 2)[0])
    commit_checkpoint(folder, info_of(1), 1, timeout_s=0)
    assert "hold only parts of" in error_of(folder)


def test_a_rank_that_never_writes_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    good = write(tmp_path, 1)
    folder = checkpoint_folder(tmp_path, 2)
    prepare_checkpoint(folder)
    write_rank(folder, 0, parts_of(1.0, 2)[0])
    with pytest.raises(CheckpointError, match=r"learner ranks \[1\] wrote no part"):
        commit_checkpoint(folder, info_of(2), 2, timeout_s=0)
    assert list(good.parent.iterdir()) == [good]


def test_what_a_rank_could_not_write_is_told_for_it_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write(tmp_path, 1)
    folder = checkpoint_folder(tmp_path, 2)
    prepare_checkpoint(folder)
    first, second = parts_of(1.0, 2)
    write_rank(folder, 0, first)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "flush", fail)
        write_rank(folder, 1, second)
    with pytest.raises(DiskError) as caught:
        commit_checkpoint(folder, info_of(2), 2, timeout_s=0)
    message = str(caught.value)
    assert f"{folder}: checkpoint not written: learner rank 1: " in message
    assert f"{WEIGHTS_FILE.format(1)}: " in message
    assert "No space left on device" in message
    assert list(good.parent.iterdir()) == [good]


def test_a_checkpoint_counts_as_that_state_only_if_it_is(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    assert checkpoint.is_checkpoint_of(folder, info_of(1))
    # Of the same iteration, but of a history that a resume gave up.
    assert not checkpoint.is_checkpoint_of(folder, replace(info_of(1), train_s=12.6))
    assert not checkpoint.is_checkpoint_of(checkpoint_folder(tmp_path, 2), info_of(2))


@pytest.mark.parametrize("killed_at", ["rename", "rmtree"])
def test_a_deletion_that_was_killed_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    old, new = write(tmp_path, 1), write(tmp_path, 2)
    with monkeypatch.context() as patch:
        owner = Path if killed_at == "rename" else shutil
        patch.setattr(owner, killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            delete_old_checkpoints(tmp_path, keep_last=1, newest=new)
    for folder in list_checkpoints(tmp_path):
        open_checkpoint(folder)
    newest = write(tmp_path, 3)
    delete_old_checkpoints(tmp_path, keep_last=1, newest=newest)
    assert list(old.parent.iterdir()) == [newest]


def killed(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def test_snapshots_go_when_a_checkpoint_is_there(tmp_path: Path) -> None:
    snapshot = write(tmp_path / SNAPSHOTS, 3)
    delete_old_checkpoints(tmp_path / SNAPSHOTS, keep_last=1, newest=snapshot)
    assert list_checkpoints(tmp_path / SNAPSHOTS) == [snapshot]
    newest = write(tmp_path, 4)
    delete_old_checkpoints(tmp_path, keep_last=1, newest=newest)
    assert not (tmp_path / SNAPSHOTS).exists()
    assert list_checkpoints(tmp_path) == [newest]


def test_two_snapshots_are_kept_whatever_is_kept_of_checkpoints(tmp_path: Path) -> None:
    # A run that bears the name of a snapshot folder: its checkpoints are none.
    run_dir = tmp_path / SNAPSHOTS
    config = tiny_config(run_dir, "checkpoint.keep_last=3", "learner.ranks=1")
    rank: Any = SimpleNamespace(rank=0, config=config, _fence=UNFENCED)
    for folder in (run_dir, run_dir / SNAPSHOTS):
        for iteration in range(1, 6):
            target = checkpoint_folder(folder, iteration)
            prepare_checkpoint(target)
            Learner._write(rank, target, info_of(iteration), whole_parts(state_of(1.0)), [])
    checkpoints, snapshots = list_checkpoints(run_dir), list_checkpoints(run_dir / SNAPSHOTS)
    assert [iteration_of(folder) for folder in checkpoints] == [3, 4, 5]
    assert [iteration_of(folder) for folder in snapshots] == [4, 5]


def test_a_rank_that_does_not_see_the_folder_is_told_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="file system that all learner ranks share"):
        write_rank(checkpoint_folder(tmp_path, 1), 1, [])


def test_the_average_is_read_instead_of_the_weights(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, 1)
    write_checkpoint(folder, info_of(1), state_of(1.0) | {"ema.a.b": torch.full((64, 32), 0.5)})
    assert read_weights(folder, average=True)["a.b"].unique().tolist() == [0.5]
    with pytest.raises(CheckpointError, match=r"learner\.ema_decay was not set"):
        read_weights(write(tmp_path, 2), average=True)


def test_the_checksum_is_of_the_weights_alone(tmp_path: Path) -> None:
    folders = [checkpoint_folder(tmp_path, n) for n in (1, 2, 3)]
    states = (state_of(1.0), state_of(1.0) | {"exp_avg.a.b": torch.zeros(64, 32)}, state_of(2.0))
    for number, (folder, state) in enumerate(zip(folders, states, strict=True), start=1):
        write_checkpoint(folder, info_of(number), state)
    same, also, other = map(weights_checksum, folders)
    assert same == also != other


def test_chosen_iterations_outlive_the_last_ones_in_their_own_history(tmp_path: Path) -> None:
    best, old, judged, new, abandoned = (write(tmp_path, n) for n in (3, 4, 5, 6, 9))
    delete_old_checkpoints(tmp_path, keep_last=1, newest=new, keep_also=[3, 5, 7, 9])
    assert list_checkpoints(tmp_path) == [best, judged, new]
    assert not old.exists()
    assert not abandoned.exists()


def test_states_that_cannot_be_listed_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").touch()
    assert list_checkpoints(tmp_path) == []
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "checkpoints" / "iteration_000001").mkdir(parents=True)
    assert list_checkpoints(tmp_path) == [tmp_path / "checkpoints" / "iteration_000001"]
    unreadable(monkeypatch, tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="checkpoints: cannot be read: Permission denied"):
        list_checkpoints(tmp_path)


@pytest.mark.parametrize("hashed", [True, False])
def test_what_is_seen_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: bool
) -> None:
    if not hashed:
        monkeypatch.setattr(checkpoint, "HASHED_AT_ONCE", 0)
    folder = write(tmp_path, 1)
    check_whole(folder)
    weights, optimizer = (folder / name for name in FILES)
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", bytes(len(whole)), whole[:-1] + b"x"):
        weights.write_bytes(damaged)
        if not hashed and damaged[:-1] == whole[:-1]:
            check_whole(folder)
            continue
        with pytest.raises(CheckpointError, match="damaged") as caught:
            check_whole(folder)
        assert BOTH_OPTIONS in str(caught.value)
    weights.write_bytes(whole)
    optimizer.unlink()
    check_whole(folder, weights_alone=True)
    with pytest.raises(CheckpointError, match=f"{optimizer}: missing"):
        check_whole(folder)
