"""The arithmetic of an iteration, printed before anything starts."""

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.config import Config
from g2rpo_ray.maths.granularity import RolloutCounts


def updates_per_iteration(config: Config, counts: RolloutCounts) -> int:
    """Optimizer steps of an iteration."""
    per_step = config.learner.update == "per_sde_step"
    return counts.groups if per_step else config.learner.updates_per_iteration


def describe(config: Config) -> str:
    """``arithmetic`` as lines to print."""
    return "\n".join(f"{name:>15}  {text}" for name, text in arithmetic(config).items())


def arithmetic(config: Config) -> dict[str, str]:
    """What the first iteration makes, and the whole run, in numbers."""
    sampling, prompts = config.sampling, config.sampling.prompts_per_iteration
    algorithm = make_algorithm(config)
    counts = algorithm.counts(0)
    # Not iterations times the first one: a window that moves changes what a prompt costs.
    run_evaluations = prompts * sum(
        algorithm.counts(iteration).evaluations for iteration in range(config.iterations)
    )
    rewards = ", ".join(
        f"{name} (weight {reward.weight:g})" if reward.weight else f"{name} (evaluated only)"
        for name, reward in sorted(config.rewards.items())
    )
    return {
        "algorithm": f"{config.algorithm}, {sampling.steps} steps, {algorithm.noise_in_words()}, "
        f"{sampling.width}x{sampling.height}",
        "rewards": rewards,
        "prompts": f"{prompts} an iteration, {prompts * config.iterations} in all",
        "trained steps": algorithm.trained_in_words(0),
        "groups": f"{prompts * counts.groups} of {sampling.members} members",
        "pictures": f"{prompts * counts.pictures} decoded and scored",
        "evaluations": f"{prompts * counts.evaluations} ({counts.evaluations} a prompt), "
        f"{run_evaluations} in all",
        "learner passes": f"{prompts * counts.learner_passes} over {config.learner.ranks} rank(s)",
        "speed": config.rollout.speed_in_words,
        "updates": f"{updates_per_iteration(config, counts)} ({config.learner.update})",
    }
