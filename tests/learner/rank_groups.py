"""Learner ranks that start anew for each test, and what tests compare of their state."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.learner.checkpoints.parts import StatePart
from g2rpo_ray.learner.update import UpdateReport
from g2rpo_ray.learner.worker import Learner
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.sampling.group import RolloutGroup
from tests.tiny import shallow_flux, tiny_config

ROUNDING = 1e-5
"""Relative error (Frobenius norm over all weights) that a float32 sum in another order makes."""

FEW_ADAPTERS = ("model.lora.rank=4", "model.lora.target_modules=[attn.to_q,ff.net.2]")
"""In both kinds of blocks: ZeRO 3 takes time for each module, and all targets are 17."""

State = dict[str, Tensor]


def small_config(run_dir: Path, *overrides: str) -> Config:
    """``tiny_config`` with half of its network: ZeRO 3 takes time for each module."""
    return tiny_config(run_dir, f"model.path={shallow_flux(run_dir / 'flux')}", *overrides)


class Rank(Learner):
    """A rank that starts anew with other settings: a process takes seconds, an engine none."""

    def restart(self, config: Config, address: str, port: int, checkpoint: Path | None) -> str:
        self.config = config
        return self.start(address, port, checkpoint)

    def shard_sums(self) -> list[int]:
        return self.engine.weight_shard_sums()

    def state_parts(self) -> list[StatePart]:
        return self.engine.state_parts()

    def restart_without_compiler(
        self, config: Config, address: str, port: int, checkpoint: Path | None
    ) -> str:
        """On a machine where torch.compile cannot work."""
        torch._dynamo.reset()
        failure = RuntimeError("no compiler for this card")
        with mock.patch("torch._inductor.compile_fx.compile_fx", side_effect=failure):
            return self.restart(config, address, port, checkpoint)

    def codes_compiled(
        self, config: Config, groups: list[ray.ObjectRef], meeting: tuple[str, int]
    ) -> tuple[int, int, UpdateReport]:
        """By the end of the start, and by that of the first update; without inductor, whose C++
        takes a minute."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with mock.patch(
            "torch._inductor.compile_fx.compile_fx", lambda graph, x, **_: aot_eager(graph, x)
        ):
            self.restart(config, *meeting, None)
            codes = torch._dynamo.utils.counters["stats"]
            at_start = codes["unique_graphs"]
            report = self.update(groups)
        return at_start, codes["unique_graphs"], report

    def step_with_gradient(self, value: float) -> float:
        """An optimizer step on a gradient that is ``value`` everywhere."""
        dtype = next(self.engine.policy.parameters()).dtype
        texts = {"t5": torch.zeros(10, 64, dtype=dtype), "pooled": torch.zeros(64, dtype=dtype)}
        embeds = Conditioning(texts)
        latents = torch.zeros(1, *self.engine.policy.shape.packed)
        velocity = self.engine(latents, torch.ones(1), embeds)
        self.engine.backward(velocity.sum() * value, last=True)
        return self.engine.step()


@dataclass
class Ranks:
    """Learner processes that form one process group, driven as LearnerGroup drives them."""

    run_dir: Path
    actors: list[ActorHandle]
    meeting: tuple[str, int]

    def call(self, method: str, *arguments: object) -> list[Any]:
        return ray.get([getattr(a, method).remote(*arguments) for a in self.actors], timeout=480)

    def save(self, folder: Path, info: CheckpointInfo) -> None:
        self.call("begin_save", folder, info)
        self.call("finish_save")

    def start(self, *overrides: str, checkpoint: Path | None = None) -> None:
        count = f"learner.ranks={len(self.actors)}"
        self.start_as(small_config(self.run_dir, count, *overrides), checkpoint)

    def start_without_compiler(self, *overrides: str) -> None:
        config = small_config(self.run_dir, "learner.compile=true", *overrides)
        self.call("restart_without_compiler", config, *self.meeting, None)

    def start_as(self, config: Config, checkpoint: Path | None = None) -> None:
        self.call("restart", config, *self.meeting, checkpoint)

    def update(self, groups: list[RolloutGroup]) -> list[UpdateReport]:
        reports: list[UpdateReport] = self.call("update", [ray.put(group) for group in groups])
        return reports

    def state(self) -> State:
        """Put together from the ranks' parts, each of which must be there once."""
        state: State = {}
        for part in (part for parts in self.call("state_parts") for part in parts):
            whole = state.setdefault(part.key, torch.full((math.prod(part.shape),), torch.nan))
            place = whole[part.start : part.start + len(part.data)]
            assert place.isnan().all()
            place.copy_(part.data)
        assert not any(whole.isnan().any() for whole in state.values())
        return state


def part(state: State, prefix: str) -> Tensor:
    return torch.cat([state[name].flatten() for name in sorted(state) if name.startswith(prefix)])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def info_of(iteration: int) -> CheckpointInfo:
    return CheckpointInfo(iteration, iteration, iteration, 0, 0.0, "full", 0)
