"""RolloutGroup: the contract between rollout and learner."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo_ray.maths import noise
from g2rpo_ray.maths.forward_process import noise_to
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.prompts.dataset import Prompt


@dataclass(frozen=True)
class GroupKey:
    """Names a rollout uniquely in a run; with ``run_seed`` it determines all of its noise."""

    run_seed: int
    group_id: int
    """iteration * prompts_per_iteration + slot: also the order in which the learner sees it."""

    def initial_noise(self, shape: tuple[int, int], member: int = 0) -> Tensor:
        """float32 ``[tokens, channels]``: where a trajectory starts."""
        return noise.normal(shape, self.run_seed, self.group_id, "initial", member)

    def member_noise(self, shape: tuple[int, int], members: int, shared: bool) -> Tensor:
        """float32 ``[1 or members, tokens, channels]``: where the members' trajectories start."""
        starts = range(1 if shared else members)
        return torch.stack([self.initial_noise(shape, member) for member in starts])

    def branch_noise(self, shape: tuple[int, int], sde_step: int, members: int) -> Tensor:
        """float32 ``[members, tokens, channels]``: what the stochastic step injects."""
        named = (self.run_seed, self.group_id, "branch", sde_step)
        return torch.stack([noise.normal(shape, *named, member) for member in range(members)])

    def forward_times(self, sigmas: Tensor, count: int, members: int) -> Tensor:
        """float32 ``[count, members]``: of each member other noise levels of the schedule above 0,
        none twice."""
        named = (self.run_seed, self.group_id, "forward times")
        chosen = [
            random.Random(noise.seed_of(*named, member)).sample(range(len(sigmas) - 1), count)
            for member in range(members)
        ]
        return sigmas.float().cpu()[torch.tensor(chosen)].T.contiguous()


@dataclass(frozen=True)
class RolloutGroup:
    """One prompt of one iteration: everything the learner needs, noise left out.

    K trained SDE steps, M members, L latents per step: 1 where the members share x_k (G2RPO),
    M where each walks its own trajectory (the baselines). With DiffusionNFT there are K noise
    levels of each member's picture in place of K steps.
    """

    key: GroupKey
    iteration: int
    weight_version: int
    """Version of the weights that drew it."""
    prompt: Prompt
    sde_steps: list[SdeStep]
    """K stochastic steps, by value: the learner needs no schedule. None with ``times``."""
    step_indices: list[int]
    """K indices into the schedule (0 to K - 1 with ``times``); they seed the branch noise."""
    latents: Tensor
    """float32 ``[K, L, tokens, channels]``: x_k; ``[1, M, ...]`` x_0 with ``times``."""
    velocities: Tensor
    """float32 ``[K, L, tokens, channels]``: v(x_k), or v(x_t), under ``weight_version``."""
    rewards: Tensor
    """float32 ``[R, granularities, K, M]``; NaN where a scorer failed."""
    reward_names: list[str]
    """R names, sorted."""
    evaluations: int
    """Velocity predictions that were made, counted at the network."""
    batch_size: int
    """Most latents in one pass of the network; the learner's passes hold no more."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: ``denoise_s``, ``decode_s``, ``score_s``."""
    times: Tensor | None = None
    """float32 ``[K, M]``: noise levels t of the forward process, where that is trained on."""

    @property
    def members(self) -> int:
        return self.rewards.shape[-1]

    def passes(self, batch_size: int, parts: int = 1) -> list[list[tuple[slice, slice]]]:
        """Of every part of the members, the passes of the network over the latents of a step, each
        with the members that it moves.

        Of a single part, with the group's own ``batch_size``, they are the rollout's, and both
        sides round alike. Where the members share x_k, a single evaluation moves them all.

        Args:
            parts: as many members in each; it divides their number.
        """
        size, shared = self.members // parts, self.latents.shape[1] == 1
        ends = range(size, self.members + 1, size)
        if shared:
            return [[(slice(0, 1), slice(end - size, end))] for end in ends]
        starts = [range(end - size, end, batch_size) for end in ends]
        passes = [
            [slice(s, min(s + batch_size, end)) for s in start]
            for start, end in zip(starts, ends, strict=True)
        ]
        return [[(rows, rows) for rows in part] for part in passes]

    def next_latents(self, position: int) -> Tensor:
        """float32 ``[M, tokens, channels]``: x_{k+1} of every member, re-made from the seeds.

        The same function of the same numbers as in the rollout, so it is equal to the bit.
        """
        step = self.sde_steps[position]
        mean = step.mean(self.latents[position], self.velocities[position])
        shape = (mean.shape[-2], mean.shape[-1])
        injected = self.key.branch_noise(shape, self.step_indices[position], self.members)
        return step.sample(mean, injected.to(mean.device))

    def noised(self, position: int) -> tuple[Tensor, Tensor]:
        """float32 ``[M, tokens, channels]`` each: x_t of every member's picture at its noise level,
        as in the rollout, and the velocity of the flow to it, noise - x_0."""
        assert self.times is not None
        x0 = self.latents[0]
        shape = (x0.shape[-2], x0.shape[-1])
        injected = self.key.branch_noise(shape, self.step_indices[position], self.members)
        return noise_to(x0, injected, self.times[position]), injected - x0
