"""Weights over a process group of the learner's ranks and all rollout workers, in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from g2rpo_ray.cluster.postmortem import error_of
from g2rpo_ray.models.weights import TensorLayout, WeightReceipt, receipt_of
from g2rpo_ray.weight_sync.base import Peer, WeightSource, WeightSync, WeightSyncError, verify
from g2rpo_ray.weight_sync.broadcast import GivenUpError, Meeting, WeightGroupError, give_up

GRACE_S = 15.0
"""A member that waits in vain says so itself within this time after its limit."""


@dataclass(frozen=True)
class _Group:
    meeting: Meeting
    members: list[Peer]
    layout: list[TensorLayout]


class NcclSync(WeightSync):
    """For full weights: NCCL where every role has a card of its own, gloo between CPUs."""

    def __init__(self, bucket_mib: int, timeout_s: float) -> None:
        """
        Args:
            bucket_mib: size of one broadcast; every member keeps two such buffers.
            timeout_s: for forming the group, and for one sync.
        """
        self._bucket_mib, self._timeout_s = bucket_mib, timeout_s
        self._group: _Group | None = None

    def sync(self, learner: WeightSource, receivers: Sequence[Peer], version: int) -> WeightReceipt:
        members = [
            Peer(f"learner rank {rank}", handle)
            for rank, handle in enumerate(learner.weight_senders)
        ]
        senders = len(members)
        members += receivers
        if self._group is None or self._group.members != members:
            self._leave(members)
            self._group = self._form(members, senders)
        group = self._group
        answers = self._call(
            f"weight sync of version {version}",
            [m.handle.send_weights.remote(version) for m in members[:senders]]
            + [m.handle.receive_broadcast.remote(version) for m in members[senders:]],
            members,
            group.meeting,
        )
        sums = [sum(parts) for parts in zip(*answers[:senders], strict=True)]
        return verify(receipt_of(version, group.layout, sums), receivers, answers[senders:])

    def _form(self, members: list[Peer], senders: int) -> _Group:
        try:
            address, port = ray.get(
                members[0].handle.open_weight_store.remote(self._timeout_s),
                timeout=self._timeout_s + GRACE_S,
            )
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise WeightSyncError(f"{members[0].name} opens no weight group: {error}") from error
        names = [member.name for member in members]
        meeting = Meeting(address, port, names, senders, self._bucket_mib, self._timeout_s)
        layouts = self._call(
            "forming the weight group",
            [m.handle.join_weight_group.remote(meeting, rank) for rank, m in enumerate(members)],
            members,
            meeting,
        )
        return _Group(meeting, members, layouts[0])

    def _leave(self, members: list[Peer]) -> None:
        """Let those who stay leave the group as it was; the others are dead or on their way out."""
        if self._group is None:
            return
        old = {member.handle for member in self._group.members}
        refs = [m.handle.leave_weight_group.remote() for m in members if m.handle in old]
        self._group = None
        ray.wait(refs, num_returns=len(refs), timeout=self._timeout_s)

    def _call(
        self, what: str, refs: list[ray.ObjectRef], members: list[Peer], meeting: Meeting
    ) -> list[Any]:
        """Every member's answer.

        Raises:
            WeightSyncError: with the members that died, hang, or failed, and the causes.
        """
        failed, silent = _settle(refs, meeting, self._timeout_s + GRACE_S)
        if not failed and not silent:
            return ray.get(refs)
        self._group = None
        causes = [
            _cause(number, members[number].name, failed.get(ref))
            for number, ref in enumerate(refs)
            if ref in failed or ref in silent
        ]
        first = min(order for order, _, _ in causes)
        roots = [(text, places) for order, text, places in causes if order == first]
        at_fault = sorted({place for _, places in roots for place in places})
        raise WeightSyncError(
            f"{what} failed: {'; '.join(text for text, _ in roots)}",
            [members[place] for place in at_fault if place >= meeting.senders],
        )


def _settle(
    refs: list[ray.ObjectRef], meeting: Meeting, limit_s: float
) -> tuple[dict[ray.ObjectRef, Exception], list[ray.ObjectRef]]:
    """The errors of those that failed, and who gave no answer; the first failure is told to all."""
    waiting = list(refs)
    failed: dict[ray.ObjectRef, Exception] = {}
    while waiting:
        done, waiting = ray.wait(waiting, timeout=GRACE_S if failed else limit_s)
        if not done:
            break
        errors = {ref: error for ref in done if (error := error_of(ref)) is not None}
        if errors and not failed:
            give_up(meeting)
        failed |= errors
    return failed, waiting


def _cause(member: int, name: str, error: Exception | None) -> tuple[int, str, list[int]]:
    """How far from the root (0 explains the failure; 1 is of a member that waited in vain, 2 of one
    told to give up), the cause in words, and the places of those at fault."""
    if error is None:
        return 0, f"no answer from {name}", [member]
    if isinstance(error, ray.exceptions.RayActorError):
        return 0, f"{name} died", [member]
    if isinstance(error, WeightGroupError):
        return 2 if isinstance(error, GivenUpError) else 1, str(error), error.members
    return 0, f"{name}: {type(error).__name__}: {error}", [member]
