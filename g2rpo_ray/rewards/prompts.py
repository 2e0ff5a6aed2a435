"""Prompts that a reward cannot judge, found before anything is drawn."""

from collections.abc import Mapping, Sequence

from g2rpo_ray.rewards.registry import parse_options, scorer_class
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.section import RewardSection


def check_prompts(
    rewards: Mapping[str, RewardSection], prompts: Sequence[str], setting: str, stop: bool
) -> None:
    """Refuse prompts whose pictures would have no score.

    Args:
        setting: what names their file.
        stop: ``advantage.on_invalid`` is ``stop``: a required reward must be able to judge all.
            Else one of them is enough.

    Raises:
        ScorerError: says how many prompts of which reward, and of one what it lacks.
    """
    for name, reward in rewards.items():
        scorer, errors = scorer_class(reward.kind), []
        options = parse_options(reward.kind, reward.options)
        for prompt in prompts:
            try:
                scorer.check_prompt(options, prompt)
            except ScorerError as error:
                errors.append(error)
        if errors and (len(errors) == len(prompts) or (stop and reward.required)):
            raise ScorerError(
                f"rewards.{name} cannot judge {len(errors)} of {len(prompts)} prompts of "
                f"{setting}, such as {errors[0]}. Take them out or complete them; with "
                f"advantage.on_invalid: drop_group, or rewards.{name}.required: false, the others "
                "are enough"
            )
