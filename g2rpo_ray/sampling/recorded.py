"""A pass of the network over one latent, recorded once as a CUDA graph and played back: a card is
done with so little before the processor has started the kernels one by one."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.policy import Policy


class RecordedPass:
    """``policy`` as it is the first time with tensors of such shapes, so that all is compiled and
    planned; recorded the second time, played back from then on. The same kernels, the same bits.

    The last shapes alone are kept: the next prompt's text may have another length.
    """

    def __init__(self, policy: Policy, warn: Callable[[str], None]) -> None:
        """``warn`` is told of a network that cannot be recorded, which is then never again."""
        self._policy, self._warn = policy, warn
        self._works = True
        # One that is out of date is kept until the next one has its memory.
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output: Tensor | None = None
        self._places: list[int] = []
        self.forget()

    def forget(self) -> None:
        """What was recorded is not played any more."""
        self._shapes: list[torch.Size] = []
        self._output = None

    def weights_changed(self) -> None:
        """What was recorded reads them where they lay, and stays if they lie there still."""
        if self._output is not None and self._places != self._weight_places():
            self.forget()

    def _weight_places(self) -> list[int]:
        tensors = (*self._policy.parameters(), *self._policy.buffers())
        return [tensor.data_ptr() for tensor in tensors]

    def __call__(self, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        """As ``Policy.forward``."""
        given = [x, sigma, *embeds.all_tensors]
        shapes = [tensor.shape for tensor in given]
        if not self._works or shapes != self._shapes:
            self.forget()
            self._shapes = shapes
            return self._policy(x, sigma, embeds)
        if self._output is None:
            try:
                self._output = self._record(x.clone(), sigma.clone(), deepcopy(embeds))
                self._places = self._weight_places()
            # Whatever a network does that a stream under capture may not.
            except RuntimeError as error:
                self._works, self._graph = False, None
                # Behind it where ending the capture failed in turn.
                cause = error.__context__ or error
                reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300]
                self._warn(f"passes over one latent are not recorded, and slower ({reason})")
                return self._policy(x, sigma, embeds)
        for kept, tensor in zip(self._inputs, given, strict=True):
            kept.copy_(tensor)
        self._play()
        return self._output.clone()

    def _play(self) -> None:
        assert self._graph is not None, "it was recorded"
        self._graph.replay()

    def _record(self, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        """Keeps these inputs; returns the output, both of which are overwritten from now on."""
        self._inputs = [x, sigma, *embeds.all_tensors]
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
        return output


@cache
def _stream() -> torch.cuda.Stream:
    """One for all: libraries keep their workspaces by stream."""
    return torch.cuda.Stream()
