"""How busy the roles are, and what was lost and replaced: differences between two iterations."""

import time

from g2rpo_ray.cluster.demand import living_nodes
from g2rpo_ray.training.heldout import HeldoutEvaluation
from g2rpo_ray.training.roles import Roles


class Activity:
    """Reads the counters of the roles and of the evaluation once an iteration."""

    def __init__(self, roles: Roles, heldout: HeldoutEvaluation) -> None:
        self._roles, self._heldout = roles, heldout
        self._last_s, self._last = time.monotonic(), self._counters()

    def lap(self) -> dict[str, float]:
        """Metrics of the time since the last call."""
        now_s, now = time.monotonic(), self._counters()
        values = {name: value - self._last[name] for name, value in now.items()}
        wall_s, self._last_s, self._last = now_s - self._last_s, now_s, now
        workers, replicas = len(self._roles.pool.workers), self._roles.rewards.replicas()
        there = {"rollout": workers, "learner": 1, "rewards": sum(replicas.values())}
        for role, count in there.items():
            busy_s, there_s = values[f"idle/{role}"], wall_s * count
            values[f"idle/{role}"] = max(0.0, 1.0 - busy_s / there_s) if there_s > 0 else 1.0
        there_now = {f"reward/{name}/replicas": count for name, count in replicas.items()}
        there_now |= {"rollout/workers": workers, "cluster/nodes": len(living_nodes())}
        return there_now | values

    def _counters(self) -> dict[str, float]:
        """Since the start; of ``idle/...`` the seconds that were not idle."""
        pool, learner = self._roles.pool, self._roles.learner
        return {
            "rollout/replaced": pool.replacements,
            "rollout/repeated": pool.repeats,
            "rollout/encoder_wait_s": pool.encoder_wait_s,
            "rollout/store_wait_s": pool.store_wait_s,
            "learner/rebuilds": learner.rebuilds,
            "evaluation/missed": self._heldout.missed,
            "checkpoint/write_s": learner.written_s,
            "idle/rollout": pool.busy_s,
            "idle/learner": learner.busy_s,
            "idle/rewards": pool.replica_busy_s.total(),
        }
