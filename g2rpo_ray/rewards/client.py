"""Asking the reward servers: retries, deadlines, and never a number that no scorer gave."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from g2rpo_ray.common.errors import RunError
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.rewards.server import ScoreAnswer, ScoreRequest

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
"""Before a request is sent again; doubled each time."""
NO_ANSWER = "scores are NaN or infinite"
"""Ends the cause where a scorer worked and had nothing to say."""


class InvalidRewardError(RunError):
    """A reward stayed without a usable number; names scorer, prompt and cause."""


@dataclass(frozen=True)
class RewardClient:
    """Scores pictures with every reward of a run; made by the driver, used by rollout workers."""

    handles: Mapping[str, DeploymentHandle]
    rewards: Mapping[str, RewardSection]
    stop_on_invalid: bool
    """Raise for an unusable reward; else leave NaN, which drops the group."""

    @property
    def names(self) -> list[str]:
        return sorted(self.rewards)

    def replicas(self) -> dict[str, int]:
        """Reward name -> replicas that run now."""
        apps = serve.status().applications
        deployments = {
            name: apps[handle.app_name].deployments[handle.deployment_name]
            for name, handle in self.handles.items()
        }
        return {name: it.replica_states.get("RUNNING", 0) for name, it in deployments.items()}

    def reads_prompts(self, name: str) -> bool:
        """Whether a reward needs a picture's prompt, as its replica says."""
        asked = self.handles[name].reads_prompts.remote(name)
        return bool(asked.result(timeout_s=self.rewards[name].timeout_s))

    def submit(
        self, prompt_id: int, prompt: str, pictures: Tensor, names: list[str]
    ) -> "SentRequests":
        """Send pictures (uint8 ``[B, H, W, 3]``, one prompt) to these rewards; returns at once.

        Rewards that share their replicas share a request: the pictures travel once.
        """
        request = ScoreRequest(
            prompt_id, prompt, pictures, ray.get_runtime_context().get_actor_id()
        )
        sharing: dict[str, list[str]] = {}
        for name in names:
            sharing.setdefault(self.rewards[name].beside or name, []).append(name)
        sent: dict[str, Any] = {}
        for together in sharing.values():
            response = self.handles[together[0]].score.remote(request, together)
            sent |= dict.fromkeys(together, response)
        return SentRequests(self, request, {name: sent[name] for name in names}, time.monotonic())


@dataclass(frozen=True)
class SentRequests:
    """Requests under way for one group of pictures, one to each replica that is asked."""

    client: RewardClient
    request: ScoreRequest
    sent: Mapping[str, Any]
    """Reward name -> Serve's response."""
    sent_at_s: float
    failures: list[str] = field(default_factory=list)
    """What failed for good, filled by ``result``."""
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    """Reward name -> ``failures``, ``wait_s`` (spent in ``result`` for it), and ``latency_s`` and
    ``batch_fill`` where there was an answer; filled by ``result``."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Replica that answered -> time that it has worked since its start; filled by ``result``."""

    @property
    def waiting_for(self) -> str:
        """Rewards without an answer yet, the one that is waited for first."""
        return "reward " + ", ".join(repr(name) for name in self.sent if name not in self.measured)

    def result(self) -> dict[str, Tensor]:
        """Wait for all scores: reward name -> float32 ``[B]``.

        Raises:
            InvalidRewardError: a reward is not usable after its retries, and the run is to stop.
        """
        scores = {}
        for name in self.sent:
            started_s = time.monotonic()
            scores[name] = self._result_of(name)
            self.measured[name]["wait_s"] = time.monotonic() - started_s
        return scores

    def _result_of(self, name: str) -> Tensor:
        reward = self.client.rewards[name]
        response, sent_at_s = self.sent[name], self.sent_at_s
        tries, losses = 0, 0
        while True:
            answer, lost = self._answer_to(response, name, sent_at_s)
            if isinstance(answer, ScoreAnswer):
                self.measured[name] = {
                    "latency_s": answer.seconds,
                    "batch_fill": answer.batch_fill,
                    "failures": tries + losses,
                }
                self.busy_s[answer.replica] = answer.busy_s
                return answer.scores
            tries, losses = (tries, losses + 1) if lost else (tries + 1, losses)
            if tries > reward.retries:
                self.measured[name] = {"failures": tries + losses}
                return self._no_scores(name, answer)
            time.sleep(min(FIRST_PAUSE_S * 2 ** (tries + losses - 1), LONGEST_PAUSE_S))
            response = self.client.handles[name].score.remote(self.request, [name])
            # Else replicas that die again and again would never use up the time of a try.
            sent_at_s = sent_at_s if lost else time.monotonic()

    def _answer_to(
        self, response: Any, name: str, sent_at_s: float
    ) -> tuple[ScoreAnswer | str, bool]:
        """A usable answer, or why there is none; and whether a replica was lost, which is no try
        of the scorer: Serve replaces a dead one, and that takes its time."""
        timeout_s = self.client.rewards[name].timeout_s
        try:
            remaining_s = max(0.0, sent_at_s + timeout_s - time.monotonic())
            answer: ScoreAnswer | ScorerError = response.result(timeout_s=remaining_s)[name]
        except TimeoutError:
            # Else the replica would score it all the same, before those that wait.
            response.cancel()
            return f"no answer within {timeout_s:g} s (rewards.{name}.timeout_s)", False
        except (RayServeException, ray.exceptions.RayError) as error:
            return f"the replica failed: {error}", time.monotonic() < self.sent_at_s + timeout_s
        if isinstance(answer, ScorerError):
            return str(answer), False
        broken = int((~answer.scores.isfinite()).sum())
        if broken:
            return f"{broken} of {len(answer.scores)} {NO_ANSWER}", False
        return answer, False

    def _no_scores(self, name: str, cause: str) -> Tensor:
        """NaN for every picture, where the run goes on then."""
        reward = self.client.rewards[name]
        message = (
            f"reward {name!r} has no usable score for prompt {self.request.prompt_id} "
            f"({self.request.prompt!r:.80}) after {reward.retries + 1} tries: {cause}"
        )
        if self.client.stop_on_invalid and reward.required:
            raise InvalidRewardError(message)
        self.failures.append(message)
        return torch.full((len(self.request.pictures),), torch.nan)
