"""Who gives the scores: scorers in this process, or reward servers on Ray Serve."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from g2rpo_ray.cluster.connect import ray_cluster
from g2rpo_ray.cluster.demand import ClusterError, living_nodes, reward_demands, shortage
from g2rpo_ray.common.device import compute_the_same_bits, role_device
from g2rpo_ray.common.secrets import redacted
from g2rpo_ray.config.scoring import ScoringConfig
from g2rpo_ray.rewards.client import NO_ANSWER, RewardClient
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import RewardScorer, check_request, check_scores
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.rewards.server import reward_servers


@dataclass(frozen=True)
class Unscored:
    """In place of a score."""

    cause: str | None
    """How the scorer failed; None: it worked, and gave no number."""


Score = float | Unscored
Asked = tuple[Tensor, str]
"""A picture, uint8 ``[1, H, W, 3]``, and its prompt."""


class Judge(Protocol):
    """Scores by any number of rewards."""

    def reads_prompts(self, name: str) -> bool:
        """Whether a reward needs a picture's prompt."""

    def scores(self, asked: Mapping[str, Sequence[Asked]]) -> dict[str, list[Score]]:
        """By reward, of each of its pictures; never raises for what a scorer does."""


class LocalJudge:
    """Every scorer in this process."""

    def __init__(self, rewards: Mapping[str, RewardSection]) -> None:
        self._rewards = rewards
        self._scorers = {name: _loaded(name, reward) for name, reward in rewards.items()}

    def reads_prompts(self, name: str) -> bool:
        return self._scorers[name].reads_prompts

    def scores(self, asked: Mapping[str, Sequence[Asked]]) -> dict[str, list[Score]]:
        return {name: self._scores_of(name, pictures) for name, pictures in asked.items()}

    def _scores_of(self, name: str, asked: Sequence[Asked]) -> list[Score]:
        scorer, size = self._scorers[name], self._rewards[name].batch_size
        found: list[Score] = []
        for part in _batches(asked, scorer.compares_pictures, size):
            scores = _ask(scorer, part)
            lacking = any(isinstance(score, Unscored) for score in scores)
            if len(part) > 1 and not scorer.compares_pictures and lacking:
                # A picture that the scorer cannot bear shall not cost the others theirs.
                scores = [score for one in part for score in _ask(scorer, [one])]
            found += scores
        return found


def _loaded(name: str, reward: RewardSection) -> RewardScorer:
    device = role_device(reward.gpus_per_replica, f"rewards.{name}.gpus_per_replica")
    return make_scorer(reward.kind, reward.options, device.type)


def _batches(asked: Sequence[Asked], whole: bool, size: int = 1) -> Iterator[Sequence[Asked]]:
    """Neighbours of one size, and where a request must be ``whole`` of one prompt."""
    kind = (lambda one: (one[0].shape, one[1])) if whole else (lambda one: one[0].shape)
    for _, group in groupby(asked, kind):
        alike = list(group)
        step = len(alike) if whole else size
        yield from (alike[first : first + step] for first in range(0, len(alike), step))


def _ask(scorer: RewardScorer, asked: Sequence[Asked]) -> list[Score]:
    pictures, prompts = torch.cat([picture for picture, _ in asked]), [text for _, text in asked]
    try:
        check_request(pictures, prompts)
        scores = check_scores(scorer.score(pictures, prompts), len(asked)).tolist()
    except Exception as error:  # noqa: BLE001  (whatever a scorer raises is told)
        cause = redacted(f"{type(error).__name__}: {error}")
        return [Unscored(cause)] * len(asked)
    return [score if abs(score) < float("inf") else Unscored(None) for score in scores]


@dataclass(frozen=True)
class ServedJudge:
    """Every scorer behind Ray Serve."""

    client: RewardClient
    readers: Set[str]
    """Rewards that need prompts."""

    def reads_prompts(self, name: str) -> bool:
        return name in self.readers

    def scores(self, asked: Mapping[str, Sequence[Asked]]) -> dict[str, list[Score]]:
        sent = [
            (name, self.client.submit(number, part[0][1], torch.cat([p for p, _ in part]), [name]))
            for name, pictures in asked.items()
            for number, part in enumerate(_batches(pictures, whole=True))
        ]
        found: dict[str, list[Score]] = {name: [] for name in asked}
        for name, request in sent:
            scores = request.result()[name].tolist()
            causes = " ".join(request.failures)
            nothing = Unscored(None if causes.endswith(NO_ANSWER) else causes)
            found[name] += [nothing] * len(scores) if causes else scores
        return found


@contextmanager
def judge_of(config: ScoringConfig, servers: str | None) -> Iterator[Judge]:
    """Load all scorers, or start their servers.

    Args:
        servers: what their names begin with, the same when it is asked again; None: no servers.

    Raises:
        ScorerError, DeviceError: one cannot be loaded.
        ClusterError: the cluster has no room for the servers.
    """
    deterministic = config.model.deterministic
    if servers is None:
        if deterministic:
            compute_the_same_bits()
        yield LocalJudge(config.rewards)
        return
    rewards = {
        # Neither bitwise the same scores nor patience are worth a wait here: the same command
        # tries again what failed.
        name: reward.model_copy(update={"merge_requests": reward.batch_size, "retries": 0})
        for name, reward in config.rewards.items()
    }
    with ray_cluster(config.cluster) as private:
        if private and (reasons := shortage(reward_demands(config), living_nodes())):
            raise ClusterError(" ".join(reasons))
        timeout_s = config.cluster.start_timeout_s
        with reward_servers(
            servers, rewards, timeout_s, private, deterministic=deterministic
        ) as handles:
            client = RewardClient(handles, rewards, stop_on_invalid=False)
            yield ServedJudge(client, {name for name in rewards if client.reads_prompts(name)})
