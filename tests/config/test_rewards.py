"""``rewards``: their environments, their weights, and guards that lower them."""

import pytest

from g2rpo_ray.config import load_config
from tests.config.quick import error_of, quickstart
from tests.tiny import QUICKSTART


@pytest.mark.parametrize("name", ["HF_TOKEN", "judge_api_key", "DB_PASSWORD"])
def test_a_secret_in_a_runtime_env_is_refused_and_not_repeated(name: str) -> None:
    message = error_of(f"rewards.hps.runtime_env.env_vars={{{name}: sk-123, LEVEL: '3'}}")
    assert f"rewards.hps.runtime_env.env_vars.{name} looks like a secret" in message
    assert "environment variable of the nodes" in message
    assert "sk-123" not in message


def test_a_runtime_env_may_hold_other_variables() -> None:
    config = quickstart("rewards.hps.runtime_env.env_vars={LEVEL: '3'}")
    assert config.rewards["hps"].runtime_env == {"env_vars": {"LEVEL": "3"}}
    message = error_of("rewards.hps.runtime_env.env_vars=[HF_TOKEN=1]")
    assert "runtime_env.env_vars must be names with their values" in message


def test_scales_multiply_the_weights_of_rewards_alone() -> None:
    config = load_config(QUICKSTART, ["rewards.hps.weight=2", "rewards.oracle.weight=0"])
    lowered = config.reweighted({"hps": 0.25, "oracle": 0.5})
    weights = {name: reward.weight for name, reward in lowered.rewards.items()}
    own = config.rewards["clip"].weight
    assert weights == {"hps": 0.5, "clip": own, "oracle": 0}
    assert config.rewards["hps"].weight == 2
    assert lowered.trained_rewards.keys() == config.trained_rewards.keys() == {"hps", "clip"}
    assert config.reweighted({}) == config
    dumped = config.model_dump(exclude={"rewards"})
    assert lowered.model_dump(exclude={"rewards"}) == dumped


def test_a_guard_that_could_not_lower_anything_is_refused() -> None:
    guard = "evaluation.guards={oracle: {max_drop: 0.1, then: lower_weight}}"
    one = (guard, "rewards.clip.weight=0", "advantage.combine=rewards")
    assert "hps is the one trained reward and advantage.combine is rewards" in error_of(*one)
    for fine in (one[:2], (guard, one[2]), (*one, "advantage.normalisation=mean_only")):
        assert quickstart(*fine).evaluation.guards
