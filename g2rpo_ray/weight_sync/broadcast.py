"""What every member of the weights' process group does: senders and receivers, bucket by bucket.

Each sender broadcasts the part that it holds itself (its ZeRO-3 shard, or everything), so nothing
is gathered first, and no collective of the learner's own group can interleave with these.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from g2rpo_ray.common.errors import RunError
from g2rpo_ray.models.weights import TensorLayout

MIB = 2**20
BUFFERS = 2
"""One is filled or emptied while the other is on its way."""
ABORT_KEY = "abort"
POLL_S, PATIENT_POLL_S = 0.0002, 0.02
ABORT_CHECK_S = 0.5


class WeightGroupError(RunError):
    """The weights' process group failed; the message says in which phase, and who was missing.

    Args:
        members: places of those at fault, as far as this member knows.
    """

    def __init__(self, message: str, members: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.members = list(members)


class GivenUpError(WeightGroupError):
    """This member was told that another one failed."""


@dataclass(frozen=True)
class Meeting:
    """Where the members of a group meet, and in which order they are counted."""

    address: str
    port: int
    members: list[str]
    """Names for messages: the senders first, then the receivers."""
    senders: int
    bucket_mib: int
    timeout_s: float


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of one tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """What one broadcast carries."""

    sender: int
    pieces: list[Piece]

    @property
    def bytes(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


def shard_bytes(tensor: TensorLayout, shards: int) -> int:
    """Bytes of a tensor that each of ``shards`` senders holds; the last one may hold fewer.

    DeepSpeed's ZeRO-3 partition: flattened, and cut into equal parts of whole elements.
    """
    return -(-tensor.numel // shards) * tensor.itemsize


def plan_buckets(
    layout: Sequence[TensorLayout], senders: int, bucket_bytes: int
) -> Iterator[Bucket]:
    """The same buckets in the same order for every member; the senders take turns."""
    by_sender = [_fill(sender, layout, senders, bucket_bytes) for sender in range(senders)]
    for turn in zip_longest(*by_sender):
        yield from (bucket for bucket in turn if bucket is not None)


def _fill(
    sender: int, layout: Sequence[TensorLayout], senders: int, bucket_bytes: int
) -> Iterator[Bucket]:
    pieces: list[Piece] = []
    free = bucket_bytes
    for tensor in layout:
        size = shard_bytes(tensor, senders)
        start = min(sender * size, tensor.bytes)
        end = min(start + size, tensor.bytes)
        while start < end:
            stop = min(end, start + free)
            pieces.append(Piece(tensor.name, start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield Bucket(sender, pieces)
                pieces, free = [], bucket_bytes
    if pieces:
        yield Bucket(sender, pieces)


class WeightGroup:
    """One member's end of the group: NCCL between cards, gloo between CPUs."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        layout: Sequence[TensorLayout],
        device: torch.device,
        store: dist.TCPStore | None = None,
    ) -> None:
        """Wait for the other members, and make sure that all have the same tensors in mind.

        Args:
            meeting: the same for all members.
            rank: this member's place in ``meeting.members``; senders come first.
            layout: every tensor to be sent, in an order that all members share.
            device: of the tensors.
            store: of the member that opened it; the others connect to it.

        Raises:
            WeightGroupError: a member did not come in time, or has other tensors.
        """
        self._meeting, self._rank, self._device = meeting, rank, device
        self._timeout = timedelta(seconds=meeting.timeout_s)
        self._layout = list(layout)
        with self._named("joining"):
            self._store = store or dist.TCPStore(
                meeting.address, meeting.port, is_master=False, timeout=self._timeout
            )
            self._compare_layouts()
            self._group = _process_group(
                dist.PrefixStore("group", self._store),
                rank,
                len(meeting.members),
                self._timeout,
                device,
            )
        self._buffers: list[Tensor] = []
        self._transfers = 0

    def transfer(self, version: int, held: Mapping[str, Tensor]) -> None:
        """Send what this member holds, or receive in place; all members call it together.

        Args:
            version: of the weights, for messages.
            held: flat tensors by name, contiguous: a sender's own shards, or a receiver's whole
                weights, which are overwritten.

        Raises:
            WeightGroupError: a member is missing, died, or took too long. A receiver's weights
                may be half new then.
        """
        with self._named(f"sending version {version}"):
            self._transfers += 1
            self._meet(f"transfer {self._transfers}")
            if self._store.check([ABORT_KEY]):
                raise GivenUpError("came too late")
            self._transfer({name: tensor.view(torch.uint8) for name, tensor in held.items()})

    def close(self) -> None:
        """Leave the group; what is still under way is given up."""
        self._group.abort()
        self._buffers = []

    def _transfer(self, held: Mapping[str, Tensor]) -> None:
        bucket_bytes = self._meeting.bucket_mib * MIB
        largest = min(bucket_bytes, sum(tensor.bytes for tensor in self._layout))
        if not self._buffers:
            self._buffers = [
                torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)
            ]
        shards = {
            tensor.name: self._rank * shard_bytes(tensor, self._meeting.senders)
            for tensor in self._layout
        }
        receives = self._rank >= self._meeting.senders
        under_way: deque[tuple[dist.Work, Bucket, Tensor]] = deque()

        def finish() -> None:
            work, bucket, buffer = under_way.popleft()
            self._wait_for(work.is_completed, "a broadcast")
            work.wait()
            if receives:
                for piece, part in _parts(bucket, buffer):
                    held[piece.name][piece.start : piece.stop].copy_(part)

        buckets = plan_buckets(self._layout, self._meeting.senders, bucket_bytes)
        for number, bucket in enumerate(buckets):
            if len(under_way) == BUFFERS:
                finish()
            buffer = self._buffers[number % BUFFERS][: bucket.bytes]
            if bucket.sender == self._rank:
                for piece, part in _parts(bucket, buffer):
                    start = piece.start - shards[piece.name]
                    part.copy_(held[piece.name][start : start + len(part)])
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = bucket.sender, 0, True
            under_way.append((self._group.broadcast([buffer], options), bucket, buffer))
        while under_way:
            finish()

    def _compare_layouts(self) -> None:
        # Everyone looks at all of them, so that all stop here and none waits in the group's making.
        self._meet("layout", "\n".join(tensor.description for tensor in self._layout))
        first, *others = (
            self._store.get(f"layout/{rank}").decode() for rank in range(len(self._meeting.members))
        )
        names = self._meeting.members
        for member, other in enumerate(others, start=1):
            if other != first:
                sent, held = set(first.splitlines()), set(other.splitlines())
                raise WeightGroupError(
                    f"{names[member]} has other tensors than {names[0]}: "
                    f"{', '.join(sorted(held - sent)[:3]) or 'none'} instead of "
                    f"{', '.join(sorted(sent - held)[:3]) or 'none'}; both sides must use the "
                    "same model",
                    [member],
                )

    def _meet(self, key: str, value: str = "here") -> None:
        """Wait until every member has come to ``key``: a hang is found before NCCL could hang."""
        self._store.set(f"{key}/{self._rank}", value)
        keys = [f"{key}/{rank}" for rank in range(len(self._meeting.members))]
        try:
            self._wait_for(lambda: self._store.check(keys), f"all members at '{key}'")
        except GivenUpError:
            raise
        except WeightGroupError as error:
            missing = [member for member, one in enumerate(keys) if not self._store.check([one])]
            names = ", ".join(self._meeting.members[member] for member in missing)
            raise WeightGroupError(f"{error}; missing: {names}", missing) from None

    def _wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        started_s = checked_s = time.monotonic()
        while not is_done():
            now_s = time.monotonic()
            time.sleep(POLL_S if now_s - started_s < ABORT_CHECK_S else PATIENT_POLL_S)
            if now_s - checked_s > ABORT_CHECK_S:
                checked_s = now_s
                if self._store.check([ABORT_KEY]):
                    raise GivenUpError("given up, because another member failed")
            if now_s - started_s > self._meeting.timeout_s:
                raise WeightGroupError(
                    f"waited {self._meeting.timeout_s:g} s for {what} (weight_sync.timeout_s)"
                )

    @contextmanager
    def _named(self, phase: str) -> Iterator[None]:
        """Turns errors of torch.distributed into ours, with the member and the phase."""
        where = f"{self._meeting.members[self._rank]}, {phase}"
        try:
            yield
        except WeightGroupError as error:
            raise type(error)(f"{where}: {error}", error.members) from None
        except RuntimeError as error:
            # torch's distributed errors are RuntimeErrors, and so is a lost connection of gloo.
            raise WeightGroupError(f"{where}: {error}") from error


def open_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Where the members of a group meet, on a free port of this machine (``store.port``)."""
    return dist.TCPStore(
        address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def give_up(meeting: Meeting) -> None:
    """Tell all members of a group that one has failed, so that none waits for its time limit."""
    # An error: the member that holds the store is dead. The others have lost it, too, and know.
    with suppress(RuntimeError):
        store = dist.TCPStore(
            meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=5)
        )
        store.set(ABORT_KEY, "1")


def _parts(bucket: Bucket, buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    sizes = [piece.stop - piece.start for piece in bucket.pieces]
    return zip(bucket.pieces, buffer.split(sizes), strict=True)


def _process_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Any:
    """A group beside torch's default one, which belongs to DeepSpeed."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    # This file's own limit comes first; NCCL's watchdog would end the process, and its state.
    options._timeout = 2 * timeout + timedelta(seconds=60)
    name, clean_up_only = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
    before = os.environ.get(name)
    os.environ[name] = clean_up_only
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
