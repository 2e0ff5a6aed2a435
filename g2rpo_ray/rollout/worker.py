"""RolloutWorker: one policy and VAE on a Ray actor; draws, decodes, and has pictures scored."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from g2rpo_ray.algorithm import noise
from g2rpo_ray.algorithm.schedule import dynamic_shift_schedule, static_shift_schedule
from g2rpo_ray.config import Config, SamplingSection
from g2rpo_ray.device import role_device
from g2rpo_ray.errors import RunError
from g2rpo_ray.models.embeds import PromptEmbeds
from g2rpo_ray.models.flux import LatentShape, load_policy
from g2rpo_ray.models.loading import DTYPES, load_part
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.models.weights import (
    WeightReceipt,
    layout_of,
    load_weights,
    receipt,
    trainable_parameters,
)
from g2rpo_ray.prompts.dataset import Prompt
from g2rpo_ray.rollout.group import GroupKey, RolloutGroup
from g2rpo_ray.rollout.sampler import Sampler
from g2rpo_ray.rollout.strategies import make_strategy
from g2rpo_ray.weight_sync.broadcast import Meeting, WeightGroup


class BrokenLatentsError(RunError):
    """The network gave pictures that are not finite, and the run is to stop then."""


class PendingScores(Protocol):
    """Scores under way."""

    @property
    def failures(self) -> list[str]:
        """After ``result``: what failed for good, in words."""

    @property
    def measured(self) -> dict[str, dict[str, float]]:
        """After ``result``: reward name -> ``latency_s``, ``batch_fill``, ``failures``."""

    def result(self) -> dict[str, Tensor]:
        """Reward name -> float32 ``[B]``; NaN for a failed reward, if the run goes on then."""


class Scoring(Protocol):
    """What a worker needs of the reward servers."""

    @property
    def names(self) -> list[str]: ...

    def submit(
        self, prompt_id: int, prompt: str, pictures: Tensor, names: list[str]
    ) -> PendingScores: ...


@dataclass(frozen=True)
class RolloutSummary:
    """The small part of a rollout that the driver looks at."""

    group_id: int
    weight_version: int
    evaluations: int
    pictures: int
    seconds: dict[str, float]
    reward_mean: dict[str, float]
    """Mean of each reward over all pictures; NaN where all failed."""
    reward_spread: dict[str, float]
    """Mean over (granularity, step) of the standard deviation inside the group."""
    constant_share: dict[str, float]
    """Share of (granularity, step) whose spread is at most ``advantage.min_spread``."""
    failures: list[str]
    """Rewards that failed for good, in words."""
    measured: list[dict[str, dict[str, float]]]
    """What each request to the reward servers took, see ``PendingScores.measured``."""


@dataclass(frozen=True)
class HeldoutDraw:
    """How held-out pictures are drawn."""

    steps: int
    """Evaluations of a whole trajectory."""
    pictures: int
    """Pictures of each prompt, each from its own fixed seed."""
    first: int = 0
    """Schedule index to start from; above 0 the latents there must be given."""
    last: int | None = None
    """Schedule index to stop at; None walks to the end."""


@dataclass(frozen=True)
class HeldoutPictures:
    """Evaluation of one held-out prompt."""

    prompt_id: int
    prompt: str
    pictures: Tensor
    """uint8 ``[J, H, W, 3]``."""
    scores: dict[str, Tensor]
    """Reward name -> float32 ``[J]``."""
    evaluations: int


def schedule_of(sampling: SamplingSection, steps: int, shape: LatentShape) -> Tensor:
    """The configured schedule ``[steps + 1]``, computed in float32 as diffusers does."""
    if sampling.schedule == "dynamic":
        return dynamic_shift_schedule(steps, shape.packed[0], dtype=torch.float32)
    return static_shift_schedule(steps, sampling.shift, torch.float32)


class RolloutWorker:
    """Draws groups with the weights it was last given. A plain class: Ray wraps it in the pool."""

    def __init__(self, config: Config, scoring: Scoring) -> None:
        torch.set_num_threads(config.rollout.threads)
        self.config, self.scoring = config, scoring
        self.device = role_device(config.rollout.gpus_per_worker)
        self.policy = load_policy(config).to(self.device)
        vae = load_part(config.model, "vae", DTYPES[config.model.dtype]).to(self.device)
        self.shape = self.policy.shape
        self.decoder = PictureDecoder(vae, self.shape, config.rollout.decode_batch_size)
        self.strategy = make_strategy(config)
        self.weight_version = 0
        """0 are the weights of the model folder."""

    def receive_weights(self, version: int, weights: Mapping[str, Tensor]) -> WeightReceipt:
        """Take over new weights and answer with what the model now really holds."""
        load_weights(self.policy, weights)
        self.weight_version = version
        return receipt(version, trainable_parameters(self.policy))

    def join_weight_group(self, meeting: Meeting, rank: int) -> None:
        """Become a receiver of a group."""
        layout = layout_of(trainable_parameters(self.policy))
        self._weight_group = WeightGroup(meeting, rank, layout, self.device)

    def leave_weight_group(self) -> None:
        """Before another group is formed."""
        self._weight_group.close()

    def receive_broadcast(self, version: int) -> WeightReceipt:
        """Take over new weights in place; answers with what the model now really holds."""
        weights = trainable_parameters(self.policy)
        self._weight_group.transfer(
            version, {name: weight.detach().view(-1) for name, weight in weights.items()}
        )
        self.weight_version = version
        return receipt(version, weights)

    def rollout(
        self, prompt: Prompt, group_id: int, iteration: int
    ) -> tuple[RolloutSummary, RolloutGroup]:
        """Draw, decode and score one prompt; scoring runs while the next step is completed."""
        config = self.config
        key = GroupKey(config.seed, group_id)
        evaluations_before = self.policy.evaluations
        clock = _Clock()

        sampler = self._sampler(config.sampling.steps)
        draw = self.strategy.draw(sampler, self._embeds(prompt), key, iteration)
        names = sorted(config.trained_rewards)
        rewards = torch.full(
            (len(names), draw.granularities, len(draw.sde_steps), config.sampling.members),
            torch.nan,
        )
        pending: list[tuple[list[int], Tensor, PendingScores]] = []
        decoded = 0
        for positions, x0 in draw.finished:
            clock.lap("denoise_s")
            finite = x0.isfinite().all(dim=-1).all(dim=-1)
            pictures = self.decoder.decode(x0.flatten(0, 1))
            decoded += len(pictures)
            sent = self.scoring.submit(prompt.prompt_id, prompt.text, pictures, names)
            pending.append((positions, finite, sent))
            clock.lap("decode_s")
        clock.lap("denoise_s")
        failures: list[str] = []
        for positions, finite, scores in pending:
            failures += self._broken_pictures(finite, prompt)
            broken = ~finite.cpu()[:, None]
            for row, values in enumerate(scores.result().values()):
                by_member = values.view(draw.granularities, 1, -1)
                rewards[row][:, positions] = by_member.masked_fill(broken, torch.nan)
            failures += scores.failures
        clock.lap("score_s")

        group = RolloutGroup(
            key=key,
            iteration=iteration,
            weight_version=self.weight_version,
            prompt=prompt,
            sde_steps=draw.sde_steps,
            step_indices=draw.step_indices,
            latents=draw.latents.cpu(),
            velocities=draw.velocities.cpu(),
            rewards=rewards,
            reward_names=names,
            evaluations=self.policy.evaluations - evaluations_before,
            batch_size=config.rollout.batch_size,
            seconds=clock.seconds,
        )
        measured = [scores.measured for _, _, scores in pending]
        return self._summary(group, decoded, failures, measured), group

    def evaluate(
        self, prompt: Prompt, draw: HeldoutDraw | None = None, latents: Tensor | None = None
    ) -> HeldoutPictures:
        """Draw a held-out prompt by ODE from fixed seeds and score it with every reward.

        Args:
            draw: ``config.evaluation``'s by default.
            latents: float32 ``[J, tokens, channels]`` at ``draw.first``; noise by default.
        """
        before = self.policy.evaluations
        settings = self.config.evaluation
        draw = draw or HeldoutDraw(settings.steps, settings.pictures_per_prompt)
        pictures = self.decoder.decode(self.walk(prompt, draw, latents))
        pending = self.scoring.submit(prompt.prompt_id, prompt.text, pictures, self.scoring.names)
        scores = pending.result()
        evaluations = self.policy.evaluations - before
        return HeldoutPictures(prompt.prompt_id, prompt.text, pictures, scores, evaluations)

    def walk(self, prompt: Prompt, draw: HeldoutDraw, latents: Tensor | None = None) -> Tensor:
        """Latents float32 ``[J, tokens, channels]`` of a held-out prompt at ``draw.last``."""
        if latents is None:
            # Without the run's seed: all runs and iterations are judged from the same noise.
            shape = self.shape.packed
            noises = [
                noise.normal(shape, "heldout", prompt.prompt_id, number)
                for number in range(draw.pictures)
            ]
            latents = torch.stack(noises)
        sampler = self._sampler(draw.steps)
        start = latents.to(self.device)
        return sampler.trajectory(start, self._embeds(prompt), draw.first, draw.last).x0

    def _broken_pictures(self, finite: Tensor, prompt: Prompt) -> list[str]:
        # Its log-probability is infinite then, and a scorer may still give its picture a number.
        if bool(finite.all()):
            return []
        message = (
            f"{int((~finite).sum())} of {finite.numel()} pictures have latents that are not "
            f"finite, prompt {prompt.text!r:.80}"
        )
        if self.config.advantage.on_invalid == "stop":
            raise BrokenLatentsError(message)
        return [message]

    def _sampler(self, steps: int) -> Sampler:
        sigmas = schedule_of(self.config.sampling, steps, self.shape)
        return Sampler(self.policy, sigmas, self.config.rollout.batch_size)

    def _embeds(self, prompt: Prompt) -> PromptEmbeds:
        return prompt.embeds.to(self.device)

    def _summary(
        self,
        group: RolloutGroup,
        pictures: int,
        failures: list[str],
        measured: list[dict[str, dict[str, float]]],
    ) -> RolloutSummary:
        by_reward = dict(zip(group.reward_names, group.rewards, strict=True))
        spread = {name: values.std(dim=-1) for name, values in by_reward.items()}
        limit = self.config.advantage.min_spread
        return RolloutSummary(
            group_id=group.key.group_id,
            weight_version=group.weight_version,
            evaluations=group.evaluations,
            pictures=pictures,
            seconds=group.seconds,
            reward_mean={name: float(values.nanmean()) for name, values in by_reward.items()},
            reward_spread={name: float(values.nanmean()) for name, values in spread.items()},
            constant_share={
                name: float((values <= limit).float().mean()) for name, values in spread.items()
            },
            failures=failures,
            measured=measured,
        )


class _Clock:
    """Wall time by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to ``phase``."""
        now_s = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s
