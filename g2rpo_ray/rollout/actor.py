"""The rollout worker as a Ray actor: ``start`` loads its models, and it answers while it works."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from g2rpo_ray.config import Config
from g2rpo_ray.models.weights import PackedWeights, WeightReceipt, receipt, trainable_parameters
from g2rpo_ray.rollout.phases import REPORTS, Phase
from g2rpo_ray.rollout.worker import RolloutWorker, Scoring


class RolloutActor(RolloutWorker):
    """A worker whose models are loaded by ``start``: by then it is known where it runs."""

    def __init__(self) -> None:
        pass

    def start(self, config: Config, scoring: Scoring, number: int) -> str:
        """Load, compile and warm up; answers with how, in one line."""
        super().__init__(config, scoring, number)
        return ", ".join(filter(None, [self.engine.description, self.frozen.description]))

    @ray.method(concurrency_group=REPORTS)
    def phase(self) -> Phase:
        """What it does with its task just now."""
        return self.own_time.now()

    @ray.method(concurrency_group=REPORTS)
    def export_weights(self) -> tuple[WeightReceipt, PackedWeights]:
        """What it holds, for a newcomer: a prompt that is being drawn goes on."""
        weights = trainable_parameters(self.policy)
        # One by one to the host: the card has no room for all of them once more.
        copies = {name: weight.detach().cpu() for name, weight in weights.items()}
        return receipt(self.weight_version, copies), PackedWeights.of(copies)


def actor_class(worker: type) -> Any:
    """A class of workers as actors, which answer ``phase`` and ``export_weights`` at any time."""
    return ray.remote(concurrency_groups={REPORTS: 2})(worker)


def hire_actor(config: Config, avoided: Sequence[str]) -> ActorHandle:
    """Starts an empty RolloutActor with the resources of a worker."""
    settings = config.rollout
    labels = dict(settings.label_selector)
    if avoided:
        labels["ray.io/node-id"] = f"!in({','.join(avoided)})"
    actor = actor_class(RolloutActor).options(
        num_cpus=settings.cpus_per_worker,
        num_gpus=settings.gpus_per_worker,
        label_selector=labels,
        # Else a prompt that is on its way to the worker keeps it from saying so.
        allow_out_of_order_execution=True,
    )
    return actor.remote()
