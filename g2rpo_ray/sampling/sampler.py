"""Batched sampling with one policy: anchors, completions and plain trajectories.

Without Ray, rewards or decoding, so that it runs in a notebook and in ``scripts/check_golden.py``.
A batch holds evaluations of one prompt only: its composition, and so its rounding, is a function
of the prompt alone.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from g2rpo_ray.maths.dpm_solver import dpm_solver_step
from g2rpo_ray.maths.granularity import PlanNode, branch_plan, completion_indices
from g2rpo_ray.maths.sde import SdeStep, euler_step, predict_x0
from g2rpo_ray.maths.shared_walk import Evaluation, read_steps, walk_ahead
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.sampling.evaluator import Evaluator


@dataclass(frozen=True)
class Trajectory:
    """Walks of B latents along the schedule."""

    latents: Tensor
    """float32 ``[K, B, tokens, channels]``: x_k at the steps that were kept, ascending."""
    velocities: Tensor
    """float32 ``[K, B, tokens, channels]``."""
    x0: Tensor
    """float32 ``[B, tokens, channels]``: the latents at the end."""


@dataclass(order=True)
class _Pending:
    """An evaluation that can run now; the smallest runs first."""

    priority: tuple[int, int, int, int]
    node: PlanNode = field(compare=False)
    position: int = field(compare=False)
    member: int = field(compare=False)
    x: Tensor = field(compare=False)
    read: dict[int, Tensor] = field(compare=False)
    """Of a walk that all granularities share: the latents on the coarser grids, by position."""
    previous: Evaluation | None = field(compare=False, default=None)
    """The evaluation before; none at a branch."""


class Sampler:
    """Draws with one policy on one schedule, a prompt at a time."""

    def __init__(
        self,
        exact: Evaluator,
        sigmas: Tensor,
        estimate: Evaluator | None = None,
        estimate_above: float = 0.0,
    ) -> None:
        """
        Args:
            exact: of what is trained on, and of pictures that are shown.
            sigmas: ``[T + 1]``.
            estimate: of completions, which estimate a reward; none is ``exact``.
            estimate_above: noise level above which they use it, and ``exact`` up to it.
        """
        self.exact, self.estimate = exact, estimate or exact
        self.sigmas, self._estimate_above = sigmas, estimate_above
        self._levels: list[float] = sigmas.tolist()

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def shape(self) -> LatentShape:
        return self.exact.policy.shape

    def trajectory(
        self, start: Tensor, embeds: Conditioning, first: int = 0, last: int | None = None
    ) -> Trajectory:
        """Walk the schedule, or a part of it, by ODE, and keep every step.

        Args:
            start: float32 ``[B, tokens, channels]``: noise, or the latents at ``first``.
            first: schedule index to walk from.
            last: schedule index to walk to; the schedule's end by default.
        """
        indices = range(first, (self.steps if last is None else last) + 1)
        return self.walk(start, indices, {}, indices, embeds)

    def arrive(
        self, start: Tensor, embeds: Conditioning, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Where ``trajectory`` ends, float32 ``[B, tokens, channels]``, without keeping its steps;
        ``start`` where it has none."""
        indices = range(first, (self.steps if last is None else last) + 1)
        return self.walk(start, indices, {}, (), embeds).x0

    @torch.no_grad()
    def walk(
        self,
        start: Tensor,
        indices: Sequence[int],
        injected: Mapping[int, tuple[SdeStep, Tensor]],
        kept: Collection[int],
        embeds: Conditioning,
        second_order_from: int | None = None,
    ) -> Trajectory:
        """Walk latents along the schedule, stochastic where noise is injected, else by ODE.

        Members that start from one noise are one latent up to the first stochastic step.

        Args:
            start: float32 ``[B, tokens, channels]``; B is 1 or M where noise is injected.
            indices: schedule indices to visit, ascending.
            injected: stochastic steps by schedule index, each with its noise, float32
                ``[M, tokens, channels]``.
            kept: indices whose latents and velocities are returned, all of the same B; may be
                none.
            second_order_from: schedule index from which on the ODE is solved by DPM-Solver++.
        """
        x, latents, velocities = start, [], []
        previous: tuple[Tensor, float] | None = None
        for index, next_index in pairwise(indices):
            if index in injected:
                step, noise = injected[index]
                x = x.expand_as(noise)
            v = self.exact(x, self._sigmas_of([index] * len(x), x), embeds)
            if index in kept:
                latents.append(x)
                velocities.append(v)
            sigma, sigma_next = self._levels[index], self._levels[next_index]
            if index in injected:
                x = step.sample(step.mean(x, v), noise)
            elif second_order_from is not None and index >= second_order_from:
                x0 = predict_x0(x, v, sigma)
                x = dpm_solver_step(x, x0, sigma, sigma_next, previous)
                previous = (x0, sigma)
            else:
                x = euler_step(x, v, sigma, sigma_next)
        if not latents:
            none = x.new_empty(0, *x.shape)
            return Trajectory(none, none, x)
        return Trajectory(torch.stack(latents), torch.stack(velocities), x)

    @torch.no_grad()
    def completions(
        self,
        branches: Tensor,
        step_indices: Sequence[int],
        granularities: Sequence[int],
        embeds: Conditioning,
        stride: int = 1,
    ) -> Iterator[tuple[int, Tensor]]:
        """Finish every branch by ODE on every granularity, sharing common prefixes.

        All SDE steps, members and granularities flow through one queue, early SDE steps first, so
        that batches stay full while finished steps can already be decoded and scored.

        Args:
            branches: float32 ``[K, M, tokens, channels]``: x_{k+1} of every member.
            step_indices: the K SDE steps k.
            granularities: Lambda.
            stride: above 1, the network is evaluated at every so many steps only, on one walk
                for all granularities (``maths/shared_walk.py``).

        Yields:
            ``(position of the step in step_indices, x_0 float32 [granularities, M, tokens,
            channels])``, each step once, as soon as it is complete.
        """
        members = branches.shape[1]
        # The x_0 prediction of a grid's last evaluation is a step to sigma 0.
        grids = [
            [[*completion_indices(self.steps, k, g)[:-1], self.steps] for g in granularities]
            for k in step_indices
        ]
        # A batch is of one evaluator.
        queues: dict[Evaluator, list[_Pending]] = {self.exact: [], self.estimate: []}
        coarser = [p for p, g in enumerate(granularities) if g > 1] if stride > 1 else []
        for position, (k, starts) in enumerate(zip(step_indices, branches, strict=True)):
            root = branch_plan(self.steps, k, granularities, stride)
            for member, x in enumerate(starts):
                self._push(queues, root, position, member, x, dict.fromkeys(coarser, x))
        results = branches.new_empty(len(step_indices), len(granularities), *branches.shape[1:])
        missing = [len(granularities) * members] * len(step_indices)

        while any(queues.values()):
            evaluate = _next_queue(queues)
            batch_size = min(evaluate.batch_size, len(queues[evaluate]))
            batch = [heapq.heappop(queues[evaluate]) for _ in range(batch_size)]
            x = torch.stack([item.x for item in batch])
            sigma = self._sigmas_of([item.node.index for item in batch], x)
            v = evaluate(x, sigma, embeds)
            # For the batch at once: so small operations cost a card less than the host's call.
            x0 = predict_x0(x, v, sigma[:, None, None])
            here = [Evaluation(item.node.index, row) for item, row in zip(batch, v, strict=True)]
            reads = [
                self._read_on(item, at, grids[item.position])
                for item, at in zip(batch, here, strict=True)
            ]
            ends = [
                (row, item.position, place, item.member)
                for row, item in enumerate(batch)
                for place in item.node.completes
            ]
            if ends:
                rows, *places = map(list, zip(*ends, strict=True))
                results[tuple(places)] = x0[rows]
            for row, position, place, member in ends:
                if place in reads[row]:
                    results[position, place, member] = reads[row][place]
                missing[position] -= 1
            moves = [
                (row, index, child)
                for row, item in enumerate(batch)
                for index, child in item.node.children.items()
            ]
            if stride > 1:
                next_x = [
                    walk_ahead(self._levels, batch[row].x, here[row], batch[row].previous, index)
                    for row, index, _ in moves
                ]
            else:
                rows = [row for row, _, _ in moves]
                next_x = self._euler_steps(x, v, sigma, rows, [index for _, index, _ in moves])
            for (row, _, child), x_next in zip(moves, next_x, strict=True):
                item = batch[row]
                self._push(queues, child, item.position, item.member, x_next, reads[row], here[row])
            for position in sorted({item.position for item in batch}):
                if missing[position] == 0:
                    yield position, results[position]

    def _read_on(
        self, item: _Pending, here: Evaluation, grids: Sequence[Sequence[int]]
    ) -> dict[int, Tensor]:
        """What a shared walk's evaluation makes of the latents on the coarser grids."""
        return {
            place: read_steps(self._levels, latents, grids[place], here, item.previous)
            for place, latents in item.read.items()
        }

    def _euler_steps(
        self, x: Tensor, v: Tensor, sigma: Tensor, rows: list[int], indices: list[int]
    ) -> list[Tensor]:
        """Of each of ``rows``, one step to its index; a row may be there for several."""
        sigma_next = self._sigmas_of(indices, x)[:, None, None]
        chosen = torch.tensor(rows, dtype=torch.long).to(x.device, non_blocking=True)
        return [*euler_step(x[chosen], v[chosen], sigma[chosen, None, None], sigma_next)]

    def _push(
        self,
        queues: dict[Evaluator, list[_Pending]],
        node: PlanNode,
        position: int,
        member: int,
        x: Tensor,
        read: dict[int, Tensor],
        previous: Evaluation | None = None,
    ) -> None:
        # Within a step the longest remaining path goes first, so that it ends with full batches.
        priority = (position, -node.depth, member, node.index)
        noisy = self._levels[node.index] > self._estimate_above
        queue = queues[self.estimate if noisy else self.exact]
        heapq.heappush(queue, _Pending(priority, node, position, member, x, read, previous))

    def _sigmas_of(self, indices: list[int], x: Tensor) -> Tensor:
        """``[len(indices)]`` beside ``x``."""
        # Not waited for: what is not pinned is staged before the call returns.
        return self.sigmas[indices].to(x, non_blocking=True)


def _next_queue(queues: Mapping[Evaluator, list[_Pending]]) -> Evaluator:
    """The one with the first evaluation of those that fill a batch, or else the longest."""
    full = [evaluate for evaluate, queue in queues.items() if len(queue) >= evaluate.batch_size]
    if full:
        return min(full, key=lambda evaluate: queues[evaluate][0])
    return max(queues, key=lambda evaluate: len(queues[evaluate]))
