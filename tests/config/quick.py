"""The quickstart's settings with others in their place, and what is said of wrong ones."""

import pytest

from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import Config, load_config
from tests.tiny import QUICKSTART


def quickstart(*overrides: str) -> Config:
    # Counts that go with many others, for combinations that are to be possible or not.
    counts = ["sampling.members=8", "learner.steps_per_pass=1"]
    return load_config(QUICKSTART, [*counts, *overrides])


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        quickstart(*overrides)
    return str(caught.value)
