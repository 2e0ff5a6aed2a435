"""Waiting for ranks: what they cannot do is said in the learner's own words."""

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.learner import waiting as answers
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.waiting import GroupsLostError, RankLostError

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
