"""RolloutWorker: one policy and VAE on a Ray actor; draws, decodes, and has pictures scored."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Protocol

import torch
from torch import Tensor

from g2rpo_ray.algorithms import Draw, make_algorithm
from g2rpo_ray.common.device import give_back, keep_to_share, role_device
from g2rpo_ray.common.logs import log_as, log_context
from g2rpo_ray.config import Config
from g2rpo_ray.maths import noise
from g2rpo_ray.models.weights import (
    WeightReceipt,
    layout_of,
    load_weights,
    receipt,
    trainable_parameters,
)
from g2rpo_ray.prompts.dataset import Prompt
from g2rpo_ray.rollout.answers import (
    BrokenLatentsError,
    HeldoutDraw,
    HeldoutPictures,
    RolloutSummary,
    summarise,
)
from g2rpo_ray.rollout.device import DeviceClock, HostCopy
from g2rpo_ray.rollout.phases import OwnTime
from g2rpo_ray.sampling.engine import RolloutEngine
from g2rpo_ray.sampling.group import GroupKey, RolloutGroup
from g2rpo_ray.weight_sync.broadcast import Meeting, WeightGroup
from g2rpo_ray.weight_sync.frozen import FrozenParts

logger = logging.getLogger(__name__)


class PendingScores(Protocol):
    """Scores under way."""

    @property
    def failures(self) -> list[str]:
        """After ``result``: what failed for good, in words."""

    @property
    def measured(self) -> dict[str, dict[str, float]]:
        """After ``result``: reward name -> ``latency_s``, ``batch_fill``, ``failures``."""

    @property
    def busy_s(self) -> dict[str, float]:
        """After ``result``: reward replica -> time that it has worked since its start."""

    @property
    def waiting_for(self) -> str:
        """Who has not answered yet, in words; asked from another thread during ``result``."""

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
class _Sent:
    """Pictures of one prompt that are being scored."""

    positions: list[int]
    """Those among the K steps that they reward."""
    finite: Tensor
    """bool ``[granularities, M]`` on the device: whether a picture's latents are."""
    scores: Future[PendingScores]


class RolloutWorker:
    """Draws groups with the weights it was last given. A plain class: Ray wraps it in the pool."""

    def __init__(self, config: Config, scoring: Scoring, number: int = 0) -> None:
        log_as("rollout", number)
        torch.set_num_threads(config.rollout.threads)
        self.config, self.scoring = config, scoring
        gpus = config.rollout.gpus_per_worker
        self.device = role_device(gpus, "rollout.gpus_per_worker")
        keep_to_share(gpus)
        self.frozen = FrozenParts(self.device)
        self.engine = RolloutEngine(config, self.device, self.frozen)
        self.policy = self.engine.policy
        give_back(gpus)
        self._courier = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self.algorithm = make_algorithm(config)
        self._weight_group: WeightGroup | None = None
        self.own_time = OwnTime()
        self.weight_version = 0
        """0 are the weights of the model folder."""

    def receive_weights(self, version: int, weights: Mapping[str, Tensor]) -> WeightReceipt:
        """Take over new weights and answer with what the model now really holds."""
        load_weights(self.policy, weights)
        self.engine.weights_changed()
        self.weight_version = version
        return receipt(version, trainable_parameters(self.policy))

    def join_weight_group(self, meeting: Meeting, rank: int) -> None:
        """Become a receiver of a group."""
        self.leave_weight_group()
        layout = layout_of(trainable_parameters(self.policy))
        self._weight_group = WeightGroup(meeting, rank, layout, self.device)

    def leave_weight_group(self) -> None:
        """Before another group is formed; also of one that failed."""
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None

    def receive_broadcast(self, version: int) -> WeightReceipt:
        """Take over new weights in place; answers with what the model now really holds."""
        assert self._weight_group is not None, "join_weight_group comes first"
        weights = trainable_parameters(self.policy)
        self._weight_group.transfer(
            version, {name: weight.detach().view(-1) for name, weight in weights.items()}
        )
        self.engine.weights_changed()
        self.weight_version = version
        return receipt(version, weights)

    def rollout(
        self, prompt: Prompt, group_id: int, iteration: int
    ) -> tuple[RolloutSummary, RolloutGroup]:
        """Draw, decode and score one prompt.

        Nothing here waits for the device before the last latents are on their way: pictures travel
        to the reward servers while the next steps are completed.
        """
        context = log_context(iteration=iteration, prompt_id=prompt.prompt_id, group_id=group_id)
        with self.own_time.task(), context:
            config, key = self.config, GroupKey(self.config.seed, group_id)
            evaluations_before, clock = self.engine.evaluations, DeviceClock(self.device)
            sampler = self.engine.sampler(config.sampling.steps)
            draw = self.algorithm.draw(sampler, prompt.embeds.to(self.device), key, iteration)
            names = sorted(config.trained_rewards)
            shape = len(names), draw.granularities, len(draw.step_indices), config.sampling.members
            rewards = torch.full(shape, torch.nan)
            # All are on their way before the first scores are waited for.
            sent = list(self._send_finished(draw, prompt, names, clock))
            scored = [self._score(each, prompt, rewards) for each in sent]
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
                evaluations=self.engine.evaluations - evaluations_before,
                batch_size=self.engine.batch_size,
                seconds=clock.seconds(),
                times=None if draw.times is None else draw.times.cpu(),
            )
            summary = self._summary(group, sent, scored)
            counts = {"evaluations": summary.evaluations, "pictures": summary.pictures}
            logger.info("drew a group", extra=counts)
            give_back(config.rollout.gpus_per_worker)
            return summary, group

    def _send_finished(
        self, draw: Draw, prompt: Prompt, names: list[str], clock: DeviceClock
    ) -> Iterator[_Sent]:
        """Decodes what comes off the draw, and has it scored without waiting."""
        for positions, x0 in draw.finished:
            clock.lap("denoise_s")
            finite = x0.isfinite().all(dim=-1).all(dim=-1)
            pictures = self.engine.decoder.decode_on_device(x0.flatten(0, 1))
            yield _Sent(positions, finite, self._send(prompt, pictures, names))
            clock.lap("decode_s")
        clock.lap("denoise_s")

    def _score(
        self, sent: _Sent, prompt: Prompt, rewards: Tensor
    ) -> tuple[PendingScores, list[str]]:
        """Waits for the scores of pictures that were sent; says what failed, too.

        Args:
            rewards: float32 ``[rewards, granularities, K, M]``; gets the scores.
        """
        scores = sent.scores.result()
        broken = ~sent.finite.cpu()
        failures = self._broken_pictures(broken, prompt)
        for of_reward, values in zip(rewards, self._result(scores).values(), strict=True):
            by_member = values.view(len(of_reward), 1, -1)
            of_reward[:, sent.positions] = by_member.masked_fill(broken[:, None], torch.nan)
        return scores, failures + scores.failures

    def evaluate(
        self, prompt: Prompt, draw: HeldoutDraw | None = None, latents: Tensor | None = None
    ) -> HeldoutPictures:
        """Draw a held-out prompt by ODE from fixed seeds and score it with every reward.

        Args:
            draw: ``config.evaluation``'s by default.
            latents: float32 ``[J, tokens, channels]`` at ``draw.first``; noise by default.

        Raises:
            BrokenLatentsError: latents are not finite, and the run is to stop then.
        """
        with self.own_time.task():
            return self._evaluate(prompt, draw, latents)

    def _evaluate(
        self, prompt: Prompt, draw: HeldoutDraw | None, latents: Tensor | None
    ) -> HeldoutPictures:
        before = self.engine.evaluations
        settings = self.config.evaluation
        draw = draw or HeldoutDraw(settings.steps, settings.pictures_per_prompt)
        x0 = self.walk(prompt, draw, latents)
        broken = ~x0.isfinite().flatten(1).all(dim=1).cpu()
        failures = self._broken_pictures(broken, prompt)
        pictures = self.engine.decoder.decode(x0)
        pending = self.scoring.submit(prompt.prompt_id, prompt.text, pictures, self.scoring.names)
        results = self._result(pending)
        scores = {name: values.masked_fill(broken, torch.nan) for name, values in results.items()}
        give_back(self.config.rollout.gpus_per_worker)
        return HeldoutPictures(
            prompt.prompt_id,
            prompt.text,
            pictures,
            scores,
            evaluations=self.engine.evaluations - before,
            failures=failures + pending.failures,
            broken_pictures=int(broken.sum()),
            own_s=self.own_time.now().own_s,
        )

    def walk(self, prompt: Prompt, draw: HeldoutDraw, latents: Tensor | None = None) -> Tensor:
        """Latents float32 ``[J, tokens, channels]`` of a held-out prompt at ``draw.last``."""
        with self.own_time.task():
            return self._walk(prompt, draw, latents)

    def _walk(self, prompt: Prompt, draw: HeldoutDraw, latents: Tensor | None) -> Tensor:
        if latents is None:
            latents = heldout_noise(self.policy.shape.packed, prompt.prompt_id, draw.pictures)
        sampler = self.engine.sampler(draw.steps)
        start = latents.to(self.device)
        return sampler.arrive(start, prompt.embeds.to(self.device), draw.first, draw.last)

    def _result(self, scores: PendingScores) -> dict[str, Tensor]:
        with self.own_time.waiting(lambda: scores.waiting_for):
            return scores.result()

    def _broken_pictures(self, broken: Tensor, prompt: Prompt) -> list[str]:
        # Its log-probability is infinite then, and a scorer may still give its picture a number.
        if not bool(broken.any()):
            return []
        message = (
            f"{int(broken.sum())} of {broken.numel()} pictures have latents that are not "
            f"finite, prompt {prompt.text!r:.80}"
        )
        if self.config.advantage.on_invalid == "stop":
            raise BrokenLatentsError(message)
        return [message]

    def _send(self, prompt: Prompt, pictures: Tensor, names: list[str]) -> Future[PendingScores]:
        # The courier thread alone waits until the device has made the pictures.
        copied = HostCopy(pictures)
        return self._courier.submit(
            lambda: self.scoring.submit(prompt.prompt_id, prompt.text, copied.wait(), names)
        )

    def _summary(
        self, group: RolloutGroup, sent: list[_Sent], scored: list[tuple[PendingScores, list[str]]]
    ) -> RolloutSummary:
        broken = torch.cat([~each.finite.flatten() for each in sent])
        by_reward = zip(group.reward_names, group.rewards, strict=True)
        min_spread = self.config.advantage.min_spread
        warnings = list(self.engine.warnings)
        self.engine.warnings.clear()
        phase = self.own_time.now()
        return RolloutSummary(
            group_id=group.key.group_id,
            weight_version=group.weight_version,
            evaluations=group.evaluations,
            pictures=len(broken),
            seconds=group.seconds,
            rewards={name: summarise(scores, min_spread) for name, scores in by_reward},
            failures=[failure for _, failures in scored for failure in failures],
            measured=[scores.measured for scores, _ in scored],
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
            warnings=warnings,
            broken_pictures=int(broken.sum()),
            # The later of two answers of a replica, whichever came first.
            replica_busy_s=reduce(or_, (Counter(scores.busy_s) for scores, _ in scored)),
            own_s=phase.own_s,
            waited_s=phase.waited_s,
        )


def heldout_noise(shape: tuple[int, ...], prompt_id: int, pictures: int) -> Tensor:
    """Float32 ``[J, *shape]`` that a held-out prompt's pictures start from: without the run's seed,
    so that all runs and iterations are judged from the same."""
    return torch.stack([noise.normal(shape, "heldout", prompt_id, n) for n in range(pictures)])
