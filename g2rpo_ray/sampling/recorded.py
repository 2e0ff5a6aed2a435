"""Passes of the network, recorded once as CUDA graphs and played back: a card is done with little
before the processor has started the kernels one by one."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.policy import Policy


@dataclass
class Recording:
    """A pass that can be played."""

    inputs: list[Tensor]
    """What it reads."""
    output: Tensor
    """What it writes."""
    play: Callable[[], None]


class RecordedPass:
    """``policy`` as it is the first time with tensors of such shapes, so that all is compiled and
    planned; recorded the second time, played back from then on. The same kernels, the same bits.

    The shapes that were used last are kept: the next prompt's text may have another length.
    """

    def __init__(self, policy: Policy, warn: Callable[[str], None], shapes: int = 1) -> None:
        """
        Args:
            warn: is told of a network that cannot be recorded, which is then never again.
            shapes: how many are kept.
        """
        self._policy, self._warn = policy, warn
        self.shapes = shapes
        self._works = True
        self._places = self._weight_places()
        # In the order of their last use; none of shapes that were met once.
        self._recordings: dict[tuple[torch.Size, ...], Recording | None] = {}
        # The last one, also when it is out of date: the next one has its memory.
        self._graph: torch.cuda.CUDAGraph | None = None

    def weights_changed(self) -> None:
        """What was recorded reads them where they lay, and stays if they lie there still."""
        if self._places != (places := self._weight_places()):
            self._recordings.clear()
            self._places = places

    def _weight_places(self) -> list[int]:
        tensors = (*self._policy.parameters(), *self._policy.buffers())
        return [tensor.data_ptr() for tensor in tensors]

    def __call__(self, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        """As ``Policy.forward``."""
        given = [x, sigma, *embeds.all_tensors]
        key = tuple(tensor.shape for tensor in given)
        is_new = key not in self._recordings
        recording = self._recordings.pop(key, None)
        if is_new or not self._works:
            self._keep(key, None)
            return self._policy(x, sigma, embeds)
        if recording is None:
            try:
                recording = self._record(x.clone(), sigma.clone(), deepcopy(embeds))
            # Whatever a network does that a stream under capture may not.
            except RuntimeError as error:
                self._works, self._graph = False, None
                self._recordings.clear()
                # Behind it where ending the capture failed in turn.
                cause = error.__context__ or error
                reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300]
                self._warn(f"passes of the network are not recorded, and slower ({reason})")
                return self._policy(x, sigma, embeds)
        self._keep(key, recording)
        for kept, tensor in zip(recording.inputs, given, strict=True):
            kept.copy_(tensor)
        recording.play()
        # At once: all recordings have the same memory.
        return recording.output.clone()

    def _keep(self, key: tuple[torch.Size, ...], recording: Recording | None) -> None:
        self._recordings[key] = recording
        if len(self._recordings) > self.shapes:
            del self._recordings[next(iter(self._recordings))]

    def _record(self, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Recording:
        """Keeps these inputs."""
        pool = None if self._graph is None else self._graph.pool()
        graph, current, other = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), _stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            # Not torch.cuda.graph, which gives the allocator's memory back first. Other threads
            # may go on using the card.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                output = self._policy(x, sigma, embeds)
            finally:
                graph.capture_end()
        current.wait_stream(other)
        self._graph = graph
        return Recording([x, sigma, *embeds.all_tensors], output, graph.replay)


@cache
def _stream() -> torch.cuda.Stream:
    """One for all: libraries keep their workspaces by stream."""
    return torch.cuda.Stream()
