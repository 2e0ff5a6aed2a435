"""How busy the roles are, and what was lost and replaced: differences between two iterations."""

import time

from g2rpo_ray.training.heldout import HeldoutEvaluation
from g2rpo_ray.training.roles import Roles


class Activity:
    """Reads the counters of the roles and of the evaluation once an iteration."""

    def __init__(self, roles: Roles, heldout: HeldoutEvaluation) -> None:
        self._pool, self._learner, self._rewards = roles.pool, roles.learner, roles.rewards
        self._heldout = heldout
        self._last = self._counters()

    def lap(self) -> dict[str, float]:
        """Metrics of the time since the last call."""
        now = self._counters()
        change = {name: value - self._last[name] for name, value in now.items()}
        self._last = now
        workers = len(self._pool.workers)
        return {
            "rollout/workers": workers,
            "rollout/replaced": change["replaced"],
            "rollout/repeated": change["repeated"],
            "learner/rebuilds": change["rebuilds"],
            "evaluation/missed": change["missed"],
            "checkpoint/write_s": change["written_s"],
            "idle/rollout": _idle(change["rollout_s"], change["wall_s"] * workers),
            "idle/learner": _idle(change["learner_s"], change["wall_s"]),
            "idle/rewards": _idle(change["rewards_s"], change["wall_s"] * self._rewards.replicas()),
        }

    def _counters(self) -> dict[str, float]:
        return {
            "wall_s": time.monotonic(),
            "rollout_s": self._pool.busy_s,
            "learner_s": self._learner.busy_s,
            "rewards_s": self._pool.replica_busy_s.total(),
            "replaced": self._pool.replacements,
            "repeated": self._pool.repeats,
            "rebuilds": self._learner.rebuilds,
            "missed": self._heldout.missed,
            "written_s": self._learner.written_s,
        }


def _idle(busy_s: float, there_s: float) -> float:
    return max(0.0, 1.0 - busy_s / there_s) if there_s > 0 else 1.0
