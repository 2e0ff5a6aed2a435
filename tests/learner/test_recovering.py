"""LearnerGroup without processes: which failures it counts, and what it calls whole."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from g2rpo_ray.learner import ranks as ranks_module
from g2rpo_ray.learner import waiting as answers
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.learner.checkpoints.format import CheckpointError
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.ranks import LearnerGroup
from g2rpo_ray.learner.waiting import RankLostError
from tests.learner.rank_groups import info_of
from tests.states import write_checkpoint
from tests.tiny import tiny_config


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
