"""RewardServer: a Ray Serve deployment for each reward with replicas of its own; no HTTP."""

import logging
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import ray
import torch
from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview, LoggingConfig
from torch import Tensor

from g2rpo_ray.common.device import (
    HIDE_CARDS,
    KEEP_MEMORY,
    compute_the_same_bits,
    give_back,
    role_device,
)
from g2rpo_ray.common.logs import log_as, log_context
from g2rpo_ray.common.secrets import redacted
from g2rpo_ray.common.stop import heed
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import ScorerError, check_request, check_scores
from g2rpo_ray.rewards.section import RewardSection

logger = logging.getLogger(__name__)

REQUESTS_PER_REPLICA = 32
AUTOSCALING_INTERVAL_S = 2.0
LONGEST_PROBE_INTERVAL_S = 10.0
START_TRIES = 3
"""A replica whose process or node is lost while it starts is started anew, this often in all."""
NOBODY_WAITS = "dropped: who asked for these scores has ended"
_LOST = re.compile(r"\b(ActorDiedError|ActorUnavailableError|NodeDiedError)\b")
"""Ray's words for a process or node that ended; what the scorer itself raises is not among them."""
_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


@dataclass(frozen=True)
class ScoreRequest:
    """Pictures of one prompt: a whole group, so that calls are few and large."""

    prompt_id: int
    prompt: str
    pictures: Tensor
    """uint8 ``[B, H, W, 3]``."""
    requester: str | None = None
    """Id of the actor that waits for the answer; None where that is no actor."""


@dataclass(frozen=True)
class ScoreAnswer:
    """Scores of one request, and what they took."""

    scores: Tensor
    """float32 ``[B]``."""
    seconds: float
    """Time of the scorer, of all requests that shared its passes."""
    batch_fill: float
    """Pictures in the scorer's passes, by what ``batch_size`` allows."""
    replica: str
    """Who answered."""
    busy_s: float
    """Time that the replica has worked on requests since its start, failed ones included."""


class RewardServer:
    """A replica: a scorer, and those of the rewards ``beside`` it, behind ``score``."""

    def __init__(
        self, name: str, rewards: Mapping[str, RewardSection], deterministic: bool = False
    ) -> None:
        """A replica of the reward ``name``, ``deterministic`` as ``model.deterministic`` says."""
        if deterministic:
            compute_the_same_bits()
        # Of processes that a scorer starts, which it may end so: a private Ray's do not hear it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        reward = rewards[name]
        log_as(f"reward/{name}", serve.get_replica_context().replica_id.unique_id)
        torch.set_num_threads(reward.threads)
        device = role_device(reward.gpus_per_replica, f"rewards.{name}.gpus_per_replica")
        self._rewards = rewards
        self._scorers = {
            name: make_scorer(reward.kind, reward.options, device.type)
            for name, reward in rewards.items()
        }
        self._replica, self._busy_s = serve.get_replica_context().replica_id.unique_id, 0.0
        whole = len(rewards) > 1 or self._scorers[name].compares_pictures or deterministic
        self.score.set_max_batch_size(1 if whole else reward.merge_requests)

    def reads_prompts(self, name: str) -> bool:
        """Whether scores of the reward ``name`` depend on prompts: its scorer knows when loaded."""
        return self._scorers[name].reads_prompts

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0.005)
    async def score(
        self, requests: list[ScoreRequest], names: list[Sequence[str]]
    ) -> list[dict[str, ScoreAnswer | ScorerError]]:
        """For each request the answers of the rewards that it names; an error fails one alone.

        Requests that come together name the same: only a replica of one reward takes several.
        """
        with log_context(prompt_ids=[request.prompt_id for request in requests]):
            gone = [_is_gone(request.requester) for request in requests]
            wanted = [it for it, is_gone in zip(requests, gone, strict=True) if not is_gone]
            answers = {name: iter(self._answers(wanted, name)) for name in names[0]}
            return [
                {n: ScorerError(NOBODY_WAITS) if is_gone else next(it) for n, it in answers.items()}
                for is_gone in gone
            ]

    def _answers(self, requests: list[ScoreRequest], name: str) -> list[ScoreAnswer | ScorerError]:
        pictures = [request.pictures for request in requests]
        prompts = [[request.prompt] * len(request.pictures) for request in requests]
        if len(requests) > 1 and len({part.shape[1:] for part in pictures}) == 1:
            answer = self._answer(torch.cat(pictures), [*chain(*prompts)], name)
            if isinstance(answer, ScoreAnswer) and answer.scores.isfinite().all():
                parts = answer.scores.split([len(part) for part in pictures])
                return [replace(answer, scores=part) for part in parts]
        # One bad request must not fail those it met, nor leave NaN in a pass they shared.
        return [self._answer(*request, name) for request in zip(pictures, prompts, strict=True)]

    def _answer(self, pictures: Tensor, prompts: list[str], name: str) -> ScoreAnswer | ScorerError:
        started_s, scorer = time.perf_counter(), self._scorers[name]
        size = len(pictures) if scorer.compares_pictures else self._rewards[name].batch_size
        parts = []
        try:
            check_request(pictures, prompts)
            for first in range(0, len(pictures), size):
                part, texts = pictures[first : first + size], prompts[first : first + size]
                parts.append(check_scores(scorer.score(part, texts), len(part)))
        except Exception as error:
            logger.warning("the scorer failed", exc_info=True)
            cause = redacted(f"{type(error).__name__}: {error}")
            return ScorerError(f"reward {name!r}: {cause}")
        finally:
            give_back(self._rewards[name].gpus_per_replica)
            seconds = time.perf_counter() - started_s
            self._busy_s += seconds
        fill = len(pictures) / (len(parts) * size)
        return ScoreAnswer(torch.cat(parts), seconds, fill, self._replica, self._busy_s)


def _is_gone(requester: str | None) -> bool:
    """Whether an actor has ended: a lost worker's requests shall not cost the others time."""
    # Ray's public way to ask needs the dashboard; this one takes .3 ms.
    return requester is not None and ray._private.state.actors(requester)["State"] == "DEAD"


@contextmanager
def reward_servers(
    prefix: str,
    rewards: dict[str, RewardSection],
    start_timeout_s: float,
    private_cluster: bool,
    wait: Literal["none", "room", "all"] = "all",
    deterministic: bool = False,
) -> Iterator[dict[str, DeploymentHandle]]:
    """Deploy all rewards, yield each one's handle, and take exactly them down at the end.

    Args:
        prefix: unique on the cluster; an application is named ``<prefix>-<reward>``.
        private_cluster: the cluster ends with the run, and Serve with it.
        deterministic: ``model.deterministic``.
        wait: until all have their room or run; what is left is for ``wait_for_servers``.

    Raises:
        ScorerError: of ``wait_for_servers``.
    """
    names = _applications(prefix, rewards)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=_LOGGING)
    handles: list[DeploymentHandle] = []
    for app in serve.status().applications.keys() & set(names.values()):
        # Left by a driver that was killed.
        serve.delete(app)
    try:
        handles = _deploy(names, rewards, deterministic)
        if wait != "none":
            wait_for_servers(prefix, rewards, start_timeout_s, deterministic, loaded=wait == "all")
        own = dict(zip(names, handles, strict=True))
        yield {name: own[reward.beside or name] for name, reward in rewards.items()}
    finally:
        for handle in handles:
            # One that was used in this process would go on asking after its replicas, and even
            # start a new Ray for that.
            handle.shutdown()
        if not private_cluster:
            # Not serve.shutdown(): somebody else's applications may be served here, too.
            for app in names.values():
                serve.delete(app)


def _applications(prefix: str, rewards: Mapping[str, RewardSection]) -> dict[str, str]:
    """Reward with replicas of its own -> their application."""
    return {name: f"{prefix}-{name}" for name, it in rewards.items() if it.beside is None}


def _deploy(
    names: Mapping[str, str], rewards: Mapping[str, RewardSection], deterministic: bool
) -> list[DeploymentHandle]:
    """Begin to start rewards, given with their applications; replaces those of that name."""
    targets = [
        serve.RunTarget(_deployment(name, rewards, deterministic), name=app, route_prefix=None)
        for name, app in names.items()
    ]
    return serve.run_many(targets, wait_for_applications_running=False)


def _deployment(
    name: str, rewards: Mapping[str, RewardSection], deterministic: bool
) -> serve.Application:
    reward = rewards[name]
    served = {key: it for key, it in rewards.items() if name in (key, it.beside)}
    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=REQUESTS_PER_REPLICA,
        logging_config=_LOGGING,
        # A file that is missing stays missing; Serve would try for half a minute.
        max_constructor_retry_count=1,
        ray_actor_options={
            "num_cpus": reward.cpus_per_replica,
            "num_gpus": reward.gpus_per_replica,
            "runtime_env": replica_environment(reward),
            "label_selector": reward.label_selector,
        },
        autoscaling_config=AutoscalingConfig(
            min_replicas=reward.min_replicas,
            max_replicas=reward.max_replicas,
            target_ongoing_requests=reward.requests_per_replica,
            upscale_delay_s=reward.upscale_delay_s,
            downscale_delay_s=reward.downscale_delay_s,
            metrics_interval_s=AUTOSCALING_INTERVAL_S,
            look_back_period_s=3 * AUTOSCALING_INTERVAL_S,
        ),
        # Serve gives a replica up after three checks in a row without an answer.
        health_check_period_s=reward.health_timeout_s / 6,
        health_check_timeout_s=reward.health_timeout_s / 6,
        # How often one that is to end looks whether it still works; Serve's own is 2 s.
        graceful_shutdown_wait_loop_s=0.2,
    )(RewardServer)
    return deployment.bind(name, served, deterministic)


def replica_environment(reward: RewardSection) -> dict[str, Any]:
    """The replica's runtime environment, in which Serve gives up a scorer that hangs.

    Serve starts replicas without the environment of the run's other roles.

    Serve's health check does not wait for the scorer's thread; its probe of that thread waits for
    minutes, three times, where these variables are not set.
    """
    probe = {
        "RAY_SERVE_USER_HEALTH_CHECK_PROBE_TIMEOUT_S": str(reward.timeout_s),
        "RAY_SERVE_USER_HEALTH_CHECK_PROBE_INTERVAL_S": str(
            min(reward.timeout_s, LONGEST_PROBE_INTERVAL_S)
        ),
        "RAY_SERVE_USER_HEALTH_CHECK_PROBE_MAX_FAIL": "1",
    }
    variables = KEEP_MEMORY | probe | reward.runtime_env.get("env_vars", {}) | HIDE_CARDS
    return reward.runtime_env | {"env_vars": variables}


def wait_for_servers(
    prefix: str,
    rewards: Mapping[str, RewardSection],
    timeout_s: float,
    deterministic: bool = False,
    *,
    loaded: bool = True,
) -> None:
    """Return when those that ``reward_servers`` has deployed run; without ``loaded`` when each has
    its processes, and so its room.

    Raises:
        ScorerError: a scorer did not start within the time, with Serve's reason.
    """
    apps, deadline = _applications(prefix, rewards), time.monotonic() + timeout_s
    tries = Counter(apps.keys())
    while True:
        heed()
        applications = serve.status().applications
        status = {name: applications[app] for name, app in apps.items()}
        for name, app_status in status.items():
            if app_status.status != "DEPLOY_FAILED":
                continue
            reason = _reason(app_status)
            if _LOST.search(reason) is None:
                raise ScorerError(f"reward {name!r} did not start: {reason}")
            if tries[name] == START_TRIES:
                raise ScorerError(
                    f"reward {name!r} was lost {START_TRIES} times while it started (killed for "
                    f"its memory? The logs of all roles say more): {reason}"
                )
            # A node that died a moment ago is still offered by Ray.
            logger.warning("reward %r was lost while it started; once more: %s", name, reason)
            _deploy({name: apps[name]}, rewards, deterministic)
            tries[name] += 1
        placed = Counter() if loaded else _replicas()
        waiting = [
            name for name, s in status.items()
            if s.status != "RUNNING" and placed[apps[name]] < rewards[name].min_replicas
        ]  # fmt: skip
        if not waiting:
            return
        if time.monotonic() > deadline:
            reasons = "; ".join(f"{name}: {_reason(status[name])}" for name in waiting)
            raise ScorerError(
                f"rewards {', '.join(waiting)} did not start within cluster.start_timeout_s; "
                f"Serve says {reasons or 'nothing'}"
            )
        time.sleep(0.2)


def _replicas() -> Counter[str]:
    """How many processes each application of Serve has."""
    actors = ray._private.state.actors().values()
    names = [actor["Name"] for actor in actors if actor["State"] == "ALIVE"]
    start = "SERVE_REPLICA::"
    return Counter(n.removeprefix(start).partition("#")[0] for n in names if n.startswith(start))


def _reason(app_status: ApplicationStatusOverview) -> str:
    messages = [app_status.message, *(d.message for d in app_status.deployments.values())]
    return redacted(" ".join(message for message in messages if message).strip())
