"""LearnerGroup: what its ranks cannot do is said in the learner's own words."""

import re
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.common.files import DiskError
from g2rpo_ray.learner import ranks as ranks_module
from g2rpo_ray.learner import waiting as answers
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
from g2rpo_ray.learner.waiting import GroupsLostError, RankLostError
from g2rpo_ray.learner.worker import Learner
from g2rpo_ray.plan.networks import evaluation_tflop
from tests.integration.command import wait_until
from tests.states import write_checkpoint
from tests.tiny import CAPTIONS, draw_groups, encode, equal_weights, tiny_config


def info_of(iteration: int) -> CheckpointInfo:
    return CheckpointInfo(iteration, iteration, iteration, 0, 0.0, "full", 0)


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


def test_a_long_phase_says_who_is_waited_for(
    ray_cluster: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @ray.remote(num_cpus=0)
    def answer_after(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    monkeypatch.setattr(answers, "HEARTBEAT_S", 0.5)
    told: list[str] = []
    calls = [answer_after.remote(0.0), answer_after.remote(2.5)]
    ray.get(calls[0])
    assert answers.answers_of(calls, "update", 600.0, told.append) == [0.0, 2.5]
    assert len(told) > 1
    line = r"learner: 'update' for \d+ s, of 600 s at most; waiting for rank 1"
    assert re.fullmatch(line, told[0])


GLOO = RuntimeError("[/src/gloo/gloo/transport/tcp/pair.cc:545] Connection closed by peer")
NCCL = torch.distributed.DistBackendError("NCCL error: remote process exited")
LOST_NODE = ray.exceptions.ObjectLostError("00" * 28, None, "worker")


def answering_actor() -> Any:
    """It does in a call what it is told; without an import of the learner it starts soon."""

    class Answer:
        def give(self, what: Any) -> Any:
            if what == "wait":
                threading.Event().wait()
            if isinstance(what, Exception):
                raise what
            return what

    return ray.remote(num_cpus=0, max_concurrency=16)(Answer).remote()


@pytest.fixture(scope="module")
def stubs(ray_cluster: None) -> Iterator[list[Any]]:  # noqa: ARG001
    actors = [answering_actor() for _ in range(3)]
    yield actors
    for stub in actors:
        ray.kill(stub)


@pytest.mark.parametrize(
    ("given", "expected", "words"),
    [
        (
            ["wait", ValueError("no room"), 1],
            LearnerError,
            ["rank 0 does not answer", "rank 1 failed with ValueError: no room", "rank's log"],
        ),
        (
            [GLOO, torch.OutOfMemoryError("CUDA out of memory"), GLOO],
            LearnerError,
            ["rank 0, 2 failed with RuntimeError", "rank 1 failed with OutOfMemoryError: CUDA out"],
        ),
        (["wait", RunError("broken"), GLOO], RunError, ["broken"]),
        ([GLOO, InputError("no file"), "wait"], InputError, ["no file"]),
        ([1, "wait", LOST_NODE], GroupsLostError, ["learner: 'update'"]),
        (
            [NCCL, "wait", 1],
            RankLostError,
            ["rank 0 failed with DistBackendError", "rank 1 does not answer"],
        ),
        ([GLOO, GLOO, NCCL], RankLostError, ["rank 0, 1 failed", "rank 2 failed"]),
    ],
)
def test_a_ranks_own_error_is_named_and_never_taken_for_a_lost_rank(
    stubs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    given: list[Any],
    expected: type[Exception],
    words: list[str],
) -> None:
    monkeypatch.setattr(answers, "GRACE_S", 1.0)
    calls = [stub.give.remote(what) for stub, what in zip(stubs, given, strict=True)]
    # All that will answer have: what is asked for is the verdict, not the race.
    ray.wait(calls, num_returns=3 - given.count("wait"))
    with pytest.raises(expected) as caught:
        answers.answers_of(calls, "update", 600.0, print)
    assert type(caught.value) is expected
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_rank_that_died_is_named_beside_the_others_failures(
    stubs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "GRACE_S", 1.0)
    mortal = answering_actor()
    calls = [stubs[0].give.remote(GLOO), mortal.give.remote("wait"), stubs[1].give.remote("wait")]
    ray.kill(mortal)
    ray.wait(calls, num_returns=2)
    with pytest.raises(RankLostError) as caught:
        answers.answers_of(calls, "update", 600.0, print)
    for words in ("rank 0 failed with RuntimeError", "rank 1 died: ", "rank 2 does not answer"):
        assert words in str(caught.value)


def _unstarted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LearnerGroup:
    """A group without processes, which still counts its failures and starts."""
    rank = SimpleNamespace(__ray_call__=mock.Mock(), start=mock.Mock(), checksum=mock.Mock())
    fake_ray = mock.Mock()
    actor = fake_ray.remote.return_value.return_value
    actor.options.return_value.remote.return_value = rank
    monkeypatch.setattr(ranks_module, "ray", fake_ray)
    answers = [("address", 1)]
    monkeypatch.setattr(ranks_module, "answers_of", lambda refs, *_: answers * len(refs))
    monkeypatch.setattr(ranks_module, "report", lambda *_: "")
    group = LearnerGroup(tiny_config(folder / "run"), mock.MagicMock(), None, lambda _: None)
    group.start()
    return group


def test_a_learner_that_hangs_every_time_is_not_rebuilt_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = _unstarted(tmp_path, monkeypatch)
    settings = group._config.learner
    assert settings.max_failures * settings.timeout_s > settings.failure_window_s
    now_s, hangs = 0.0, 0
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    def hang() -> None:
        nonlocal now_s, hangs
        now_s, hangs = now_s + settings.timeout_s, hangs + 1
        assert hangs < 20
        raise RankLostError("learner: 'update' did not end")

    with pytest.raises(LearnerError, match=r"failure 4 of this call, and 3 within 3600 s"):
        group._recovering(hang)
    assert (hangs, group.rebuilds) == (4, 3)
    # Another call begins at one, and the window still counts over calls.
    now_s += 2 * settings.failure_window_s
    with pytest.raises(LearnerError, match="failure 4 of this call"):
        group._recovering(hang)
    assert hangs == 8


@pytest.mark.parametrize(
    ("on_disk", "words"),
    [
        ([], "is lost; --resume auto starts anew: there is no checkpoint and no snapshot in {run}"),
        ([3, 5], "is lost; --resume auto goes on after iteration 5, from {run}/checkpoints/"),
        # It became whole just before.
        ([5, 7], "--resume auto goes on after iteration 7, from {run}/checkpoints/"),
    ],
)
def test_a_learner_that_is_given_up_says_what_is_lost_and_where_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: list[int], words: str
) -> None:
    group, run = _unstarted(tmp_path, monkeypatch), tmp_path / "run"
    for iteration in on_disk:
        state = {f"{kind}.a": torch.ones(2) for kind in ("weight", "exp_avg", "exp_avg_sq")}
        write_checkpoint(checkpoint_folder(run, iteration), info_of(iteration), state)
    group._since = [ranks_module._Writing(checkpoint_folder(run, 7), info_of(7), ())]
    monkeypatch.setattr(group, "_rebuild", lambda: None)
    with pytest.raises(LearnerError, match=r"learner.max_failures is") as caught:
        group._recovering(Lost(*[DIED] * 20))
    lost = "the state of iteration 7, which was being written, "
    assert words.format(run=run) in str(caught.value)
    assert (lost in str(caught.value)) is (7 not in on_disk)
    # The ranks were ended before the disk was looked at.
    assert ranks_module.ray.kill.call_count == len(group.ranks)
    group.let_write()


class Lost:
    """A call that fails so, once for each time that it is given."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, *_: object) -> list[tuple[str, int]]:
        if self.errors:
            raise self.errors.pop(0)
        return [("address", 1)]


DIED = RankLostError("learner: a rank died")


def test_one_death_is_one_rebuild_whoever_notices_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = _unstarted(tmp_path, monkeypatch)
    first = group.ranks
    group._recovering(Lost(DIED))
    lost = Lost(DIED)
    monkeypatch.setattr(ranks_module, "answers_of", lost)
    group._start_anew(first)
    assert (group.rebuilds, lost.errors) == (1, [DIED])
    group._start_anew(group.ranks)
    assert (group.rebuilds, lost.errors) == (2, [])
    # What looked like a death was none.
    group._start_anew(group.ranks)
    assert group.rebuilds == 2
    group.close()
    lost.errors.append(DIED)
    group._start_anew(group.ranks)
    with pytest.raises(RankLostError):
        group.checksum()
    assert group.rebuilds == 2


def test_ranks_that_cannot_be_brought_to_the_weights_of_now_are_used_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = CheckpointError("damaged")
    group = _unstarted(tmp_path, monkeypatch)
    monkeypatch.setattr(ranks_module, "answers_of", Lost(DIED, broken))
    # Nobody waits for it: the next call says so, and every other.
    group._start_anew(group.ranks)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="damaged"):
            group.checksum()

    group = _unstarted(tmp_path, monkeypatch)
    group._since = [ranks_module._Learned([], {})]
    update = Lost(broken)
    monkeypatch.setattr(group, "_update", update)
    group._start_anew(group.ranks)
    with pytest.raises(CheckpointError, match="damaged"):
        group._recovering(Lost(DIED))
    assert update.errors == []
    # Again, the update would be made on what the first try has left.
    with pytest.raises(CheckpointError, match="damaged"), group.held():
        pytest.fail("held with other weights than those of its version")


def test_no_state_is_called_whole_that_ranks_of_now_have_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = _unstarted(tmp_path, monkeypatch)
    group._since = [ranks_module._Writing(checkpoint_folder(tmp_path, 1), info_of(1), ())]
    monkeypatch.setattr(ranks_module, "answers_of", Lost(DIED))
    group._start_anew(group.ranks)
    assert group._undone == group._since
    with pytest.raises(RankLostError, match="a rank died meanwhile"):
        group.let_write()


@pytest.mark.parametrize("noticed", ["by a call", "while nobody calls"])
def test_no_state_is_called_whole_where_the_ranks_did_not_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: str
) -> None:
    """A rank that never began to write has nothing to wait for, and says so to whoever asks."""
    group = _unstarted(tmp_path, monkeypatch)
    group._since = [ranks_module._Writing(checkpoint_folder(tmp_path, 1), info_of(1), ())]
    no_start = Lost(LearnerError("learner: 'placement': rank 0 failed with OutOfMemoryError"))
    if noticed == "by a call":
        monkeypatch.setattr(ranks_module, "answers_of", no_start)
        with pytest.raises(LearnerError, match="OutOfMemoryError"):
            group._recovering(Lost(DIED))
    else:
        no_start.errors.insert(0, DIED)
        monkeypatch.setattr(ranks_module, "answers_of", no_start)
        group._start_anew(group.ranks)
    assert no_start.errors == []
    monkeypatch.setattr(ranks_module, "answers_of", lambda refs, *_: [0.0] * len(refs))
    with pytest.raises(RankLostError, match="a rank died meanwhile"):
        group.let_write()
    assert (group.saved_unix_s, group._state) == (None, None)


@pytest.mark.parametrize("is_writing", [True, False])
def test_who_ends_a_run_waits_for_no_ranks_that_are_starting_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writing: bool
) -> None:
    """As by Ctrl-C, twice, while a lost rank's group loads its model."""
    group = _unstarted(tmp_path, monkeypatch)
    state = ranks_module._Writing(checkpoint_folder(tmp_path, 1), info_of(1), ())
    group._since = [state] if is_writing else []
    starting, over, start = threading.Event(), threading.Event(), group._start

    def start_slowly() -> None:
        starting.set()
        assert over.wait(60)
        start()

    monkeypatch.setattr(group, "_start", start_slowly)
    with ThreadPoolExecutor(2) as threads:
        anew = threads.submit(group._recovering, Lost(DIED), False)
        assert starting.wait(60)
        end = threads.submit(group.let_write)
        try:
            done, _ = wait([end], 20)
        finally:
            over.set()
        anew.result()
    assert done == {end}
    error = end.exception()
    assert isinstance(error, RankLostError) if is_writing else error is None


def test_a_limit_that_is_missed_is_named_by_the_setting_that_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = _unstarted(tmp_path, monkeypatch)
    settings, limits = group._config, dict[str, tuple[float, str]]()

    def silent(
        refs: list[Any], phase: str, timeout_s: float, _tell: Any, limit: str = "learner.timeout_s"
    ) -> list[Any]:
        limits[phase] = timeout_s, limit
        return [("address", 1)] * len(refs)

    monkeypatch.setattr(ranks_module, "answers_of", silent)
    group._start()
    group.heal()
    group.checksum()
    group.ranks[0].update = mock.Mock()
    with pytest.raises(AttributeError, match="records"):
        group._update(ranks_module._Learned([], {}))
    start = settings.cluster.start_timeout_s, "cluster.start_timeout_s"
    own = settings.learner.timeout_s, "learner.timeout_s"
    assert limits == {
        "placement": start,
        "address": own,
        "start": start,
        "heal": (answers.GRACE_S, "for an answer that costs nothing"),
        "checksum": own,
        "update": (settings.learner.timeout_s, "learner.min_deadline_s to timeout_s"),
    }


def test_the_first_update_after_a_rebuild_is_not_judged_by_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = _unstarted(tmp_path, monkeypatch)
    group._deadline.record(1.0)
    assert group._deadline.deadline_s < group._config.learner.timeout_s
    lost = [RankLostError("learner: a rank died")]

    def once() -> None:
        if lost:
            raise lost.pop()

    group._recovering(once)
    assert group.rebuilds == 1
    assert group._deadline.deadline_s == group._config.learner.timeout_s
