"""The learning rate, as a function of the updates done."""

from pathlib import Path

import pytest

from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config.learner import LearnerSection
from g2rpo_ray.learner.engine import learning_rate_of
from tests.tiny import tiny_config


def rates(updates: list[int], **settings: object) -> list[float]:
    section = LearnerSection.model_validate({"learning_rate": 8.0, **settings})
    return [learning_rate_of(number, section) for number in updates]


def test_constant_after_a_linear_warm_up() -> None:
    assert rates([0, 1, 3, 4, 1000], warmup_updates=4) == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_linear_falls_to_its_share_and_stays() -> None:
    settings = {"schedule": "linear", "decay_updates": 10, "warmup_updates": 2, "final_share": 0.5}
    assert rates([2, 7, 12, 99], **settings) == pytest.approx([8.0, 6.0, 4.0, 4.0])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    settings = {"schedule": "cosine", "decay_updates": 8}
    assert rates([0, 2, 4, 8, 9], **settings) == pytest.approx([8.0, 6.8284271, 4.0, 0.0, 0.0])


@pytest.mark.parametrize("override", ["learner.schedule=cosine", "learner.decay_updates=5"])
def test_half_a_schedule_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="linear and cosine need decay_updates"):
        tiny_config(Path("unused"), override)
