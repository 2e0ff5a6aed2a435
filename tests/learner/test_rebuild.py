"""LearnerGroup: ranks that die or fail are replaced, and no state is lost or half-written."""

import resource
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from g2rpo_ray.common.files import DiskError
from g2rpo_ray.learner import ranks as ranks_module
from g2rpo_ray.learner.checkpoints import format as checkpoint
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder, list_checkpoints
from g2rpo_ray.learner.checkpoints.format import (
    WEIGHTS_FILE,
    CheckpointError,
    CheckpointInfo,
    open_checkpoint,
    read_info,
)
from g2rpo_ray.learner.checkpoints.parts import StatePart
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.ranks import LearnerGroup
from g2rpo_ray.learner.waiting import RankLostError
from g2rpo_ray.learner.worker import Learner
from g2rpo_ray.plan.networks import evaluation_tflop
from tests.integration.command import wait_until
from tests.learner.rank_groups import info_of
from tests.states import write_checkpoint
from tests.tiny import CAPTIONS, draw_groups, encode, equal_weights, tiny_config


@pytest.fixture(scope="module")
def placement(ray_cluster: None) -> Iterator[PlacementGroup]:  # noqa: ARG001
    group = placement_group([{"CPU": 0.25}])
    assert group.wait(300)
    yield group
    remove_placement_group(group)


def test_a_damaged_checkpoint_is_named_and_ends_the_start(
    placement: PlacementGroup, tmp_path: Path
) -> None:
    damaged = tmp_path / "iteration_000001"
    state = {"weight.a": torch.ones(2), "exp_avg.a": torch.ones(2), "exp_avg_sq.a": torch.ones(2)}
    write_checkpoint(damaged, CheckpointInfo(1, 1, 1, 1, 1.0, "full", 0), state)
    file = damaged / WEIGHTS_FILE.format(0)
    file.write_bytes(file.read_bytes()[:-1])
    group = LearnerGroup(tiny_config(tmp_path / "run", "learner.ranks=1"), placement, damaged)
    with closing(group), pytest.raises(CheckpointError) as caught:
        group.start()
    assert f"{file}: damaged" in str(caught.value)


def test_a_rank_that_dies_while_it_starts_is_replaced(
    placement: PlacementGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Ray places it on a node whose death it has not noticed."""
    place_of = ranks_module._place_of

    def dies(rank: ray.actor.ActorHandle) -> ray.ObjectRef:
        monkeypatch.setattr(ranks_module, "_place_of", place_of)
        ray.kill(rank)
        return place_of(rank)

    monkeypatch.setattr(ranks_module, "_place_of", dies)
    told: list[str] = []
    config = tiny_config(tmp_path / "run", "learner.ranks=1")
    group = LearnerGroup(config, placement, None, told.append)
    group.start()
    assert group.rebuilds == 1
    assert "a rank died during 'placement'" in told[0]
    assert "parameters in" in group.coverage
    # And one that dies before the driver has its first answer.
    ray.kill(group.ranks[0])
    counted = group.compute("counting operations", evaluation_tflop)
    assert counted == evaluation_tflop(None, config)
    assert group.rebuilds == 2
    assert "a rank died during 'counting operations'" in "".join(told)
    group.close()


def test_a_group_that_is_closed_while_it_starts_is_not_started_anew(
    placement: PlacementGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C while the roles start."""
    told, place_of = list[str](), ranks_module._place_of
    config = tiny_config(tmp_path / "run", "learner.ranks=1")
    group, late = (LearnerGroup(config, placement, None, told.append) for _ in range(2))

    def close_meanwhile(rank: ray.actor.ActorHandle) -> ray.ObjectRef:
        closing_thread.start()
        return place_of(rank)

    closing_thread = threading.Thread(target=group.close)
    monkeypatch.setattr(ranks_module, "_place_of", close_meanwhile)
    with ThreadPoolExecutor(1) as beside:
        starting = beside.submit(group.start)
        with pytest.raises(RankLostError):
            starting.result()
    closing_thread.join()
    # A thread that comes after the end starts nothing that stays.
    late.close()
    with pytest.raises(RankLostError, match="ended while it started"):
        late.start()
    assert (group.rebuilds, late.rebuilds, told) == (0, 0, [])
    ranks = [*group.ranks, *late.ranks]
    assert len(ranks) == 2
    wait_until(lambda: all(is_dead(rank) for rank in ranks), "the end of their ranks")


def is_dead(actor: ray.actor.ActorHandle) -> bool:
    return ray._private.state.actors(actor._actor_id.hex())["State"] == "DEAD"


def test_a_rank_that_fails_dies_or_does_not_answer_is_named_with_what_it_did(
    placement: PlacementGroup, tmp_path: Path
) -> None:
    group = LearnerGroup(
        tiny_config(tmp_path / "run", "learner.ranks=1", "learner.max_failures=0"), placement, None
    )
    group.start()
    assert "parameters in" in group.coverage
    with pytest.raises(LearnerError) as caught:
        group.update([ray.put("no group")])
    assert "learner: 'update': rank 0 failed with AttributeError" in str(caught.value)
    group._timeout_s = 0.0
    with pytest.raises(LearnerError) as caught:
        group.checksum()
    assert "'checksum' did not end within 0 s (learner.timeout_s)" in str(caught.value)
    group._timeout_s = 300.0
    ray.kill(group.ranks[0])
    with pytest.raises(LearnerError, match="a rank died during 'checksum'") as caught:
        group.checksum()
    report = str(caught.value)
    assert "learner.max_failures is 0" in report
    assert "learner rank 0, pid" in report
    assert "process: gone" in report
    assert "node's memory now" in report
    assert "last lines of" in report
    assert "--resume auto" in report


@pytest.mark.long
def test_a_lost_rank_leaves_the_weights_as_they_would_have_been(
    placement: PlacementGroup, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path / "run", "learner.ranks=1")
    groups = [ray.put(group) for group in draw_groups(config, encode(config, CAPTIONS[:2]))]
    quiet = LearnerGroup(config, placement, None)
    quiet.start()
    # A guard may have lowered a weight in between: each update is made again with its own.
    scales = [{}, {"hps": 0.5}, {"hps": 0.25}]
    for own in scales:
        quiet.update(groups, own)
    expected = quiet.checksum()
    quiet.close()

    told: list[str] = []
    group = LearnerGroup(config, placement, None, told.append)
    group.start()
    first = group.update(groups, scales[0])
    # From the base model, with the first update made again.
    ray.kill(group.ranks[0])
    group.update(groups, scales[1])
    group.save(checkpoint_folder(tmp_path, 2), info_of(2))
    third = group.update(groups, scales[2])
    group.finish_save()
    # From the checkpoint, with only the third made again.
    ray.kill(group.ranks[0])
    assert group.checksum() == expected
    assert (group.rebuilds, group.version, len(group._since)) == (2, 3, 1)
    assert first.grad_norms != third.grad_norms
    rebuilding, made_again = told[::2], [line.rpartition(": ")[2] for line in told[1::2]]
    assert all("rebuilding the learner" in line for line in rebuilding)
    assert made_again == ["1", "1"]
    group.close()


def test_a_checkpoint_is_of_the_weights_of_then_whatever_comes_while_it_is_written(
    placement: PlacementGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "run", "learner.ranks=1")
    groups = [ray.put(group) for group in draw_groups(config, encode(config, CAPTIONS[:2]))]
    quiet, disturbed = (checkpoint_folder(tmp_path / name, 1) for name in ("quiet", "disturbed"))

    group = LearnerGroup(config, placement, None)
    group.start()
    group.update(groups)
    group.save(quiet, info_of(1))
    group.finish_save()
    assert group.saved_unix_s is not None
    assert group.written_s > 0
    group.close()

    told: list[str] = []
    group = LearnerGroup(config, placement, None, told.append)
    group.start()
    with closing(group):
        group.watch()
        group.update(groups)
        ray.get(group.ranks[0].__ray_call__.remote(_write_slowly))
        group.save(disturbed, info_of(1))
        # The ranks write a copy: this update does not wait, and changes nothing of what is written.
        group.update(groups)
        assert (group.saved_unix_s, list_checkpoints(disturbed.parent.parent)) == (None, [])
        # Nobody calls the learner, as while pictures are drawn; and the next rank dies, too.
        _kill_as_it_starts(monkeypatch)
        ray.kill(group.ranks[0])
        wait_until(lambda: group.rebuilds > 0, "ranks that start anew")
        # The count rises before the line is told.
        wait_until(lambda: len(told) == 3, "a line for each")
        assert ["rest" in told[0], "placement" in told[1], told[2][-1]] == [True, True, "2"]
        assert (group._undone, len(group._undone)) == (group._since, 3)
        group.finish_save()
        assert (group.rebuilds, group.version, len(group._since)) == (1, 2, 1)
    assert list(disturbed.parent.iterdir()) == [disturbed]
    assert read_info(disturbed) == info_of(1)
    states = [dict(open_checkpoint(folder)[1]) for folder in (quiet, disturbed)]
    assert equal_weights(*states)


def _kill_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank that is started, when it is asked where it is."""
    place_of, asked = ranks_module._place_of, list[ray.actor.ActorHandle]()

    def dies(rank: ray.actor.ActorHandle) -> ray.ObjectRef:
        asked.append(rank)
        if rank not in asked[:1] and len({*asked}) == 2:
            ray.kill(rank)
        return place_of(rank)

    monkeypatch.setattr(ranks_module, "_place_of", dies)


def _write_slowly(_rank: Learner) -> None:
    """Runs inside a rank."""
    write = checkpoint.write_parts

    def write_slowly(path: Path, parts: Sequence[StatePart]) -> None:
        write(path, parts)
        time.sleep(3600)  # the rank is killed meanwhile

    checkpoint.write_parts = write_slowly


def test_a_disk_that_is_full_is_named_by_the_next_call_and_the_last_good_one_stays(
    placement: PlacementGroup, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path / "run", "learner.ranks=1")
    groups = [ray.put(group) for group in draw_groups(config, encode(config, CAPTIONS[:1]))]
    group = LearnerGroup(config, placement, None)
    group.start()
    good, bad = (checkpoint_folder(tmp_path, iteration) for iteration in (1, 2))
    group.save(good, info_of(1))
    group.finish_save()
    ray.get(group.ranks[0].__ray_call__.remote(_limit_files))
    group.save(bad, info_of(2))
    ray.get(group.ranks[0].__ray_call__.remote(_await_writer))
    with pytest.raises(DiskError) as caught:
        group.update(groups)
    message = str(caught.value)
    assert f"{bad}: checkpoint not written: learner rank 0" in message
    assert f"{WEIGHTS_FILE.format(0)}: " in message
    assert "File too large" in message
    with pytest.raises(DiskError, match="File too large"):
        group.finish_save()
    assert list(good.parent.iterdir()) == [good]
    open_checkpoint(good)
    group.close()


def _await_writer(rank: Learner) -> None:
    """Runs inside a rank."""
    assert rank._writing is not None
    wait([rank._writing])


def _limit_files(_rank: Learner) -> None:
    """Runs inside a rank: no file may grow beyond 64 KiB, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
