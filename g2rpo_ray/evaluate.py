"""Scoring held-out prompts with the weights of a run, on the roles that also train."""

from typing import Any

import ray

from g2rpo_ray.config import Config
from g2rpo_ray.launch import launch_rollout
from g2rpo_ray.models.loading import check_model_folder
from g2rpo_ray.models.weights import receipt
from g2rpo_ray.prompts.dataset import evenly, read_config_prompts
from g2rpo_ray.sample import weights_of
from g2rpo_ray.stop import StopSignal
from g2rpo_ray.tracking.collect import heldout_metrics
from g2rpo_ray.weight_sync.base import verify


def evaluate(config: Config, *, checkpoint: str) -> dict[str, Any]:
    """Mean of every reward on the held-out prompts, and how many there were.

    Args:
        checkpoint: ``last``, ``base``, or the folder of a checkpoint.
    """
    check_model_folder(config.model)
    prompts = evenly(
        list(enumerate(read_config_prompts(config.prompts, config.prompts.heldout))),
        config.evaluation.prompts,
    )
    weights = weights_of(config, checkpoint)
    with StopSignal() as stop, launch_rollout(config, print) as (encoder, pool):
        if weights is not None:
            reference = ray.put(weights)
            answers = [w.receive_weights.remote(1, reference) for w in pool.workers]
            verify(receipt(1, weights), ray.get(answers, timeout=config.learner.timeout_s))
        results = pool.evaluate(
            [encoder.encode.remote(number, text) for number, text in prompts],
            lambda _done, _total: stop.check(),
        )
    means = heldout_metrics(results)
    return {
        "checkpoint": checkpoint,
        "prompts": len(results),
        "steps": config.evaluation.steps,
        "rewards": {name.removeprefix("heldout/"): value for name, value in means.items()},
    }
