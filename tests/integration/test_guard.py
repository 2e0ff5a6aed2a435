"""A whole run in which a guard lowers a weight ends in the same bits when it is killed between."""

from pathlib import Path
from typing import Any

import pytest

from g2rpo_ray.config import Config, config_from_dict
from g2rpo_ray.tracking.metrics import read_metrics
from tests.integration.command import wait_until
from tests.integration.test_train import Start, assert_same_bits, config_of, start
from tests.tiny import tiny_config

__all__ = ["start"]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]

GUARDS = {"dark": {"max_drop": 1e-6, "then": "lower_weight"}}
SETTINGS = ["iterations=5", "evaluation.every=1", "model.lora.rank=4", "learner.learning_rate=3e-3"]


def config_in(folder: Path, guards: dict[str, dict[str, Any]] = GUARDS) -> Config:
    """Light is trained on and dark is its opposite: what one gains, the other loses."""

    def light(sign: float, weight: float, **settings: Any) -> dict[str, Any]:
        options = {"target": "tests.rewards.fakes:Light", "options": {"sign": sign}}
        return {"kind": "python", "options": options, "weight": weight, **settings}

    clip = tiny_config(folder).model_dump()["rewards"]["clip"]
    tree = config_of(
        folder,
        *SETTINGS,
        light=light(1.0, 2.0, cpus_per_replica=0.1),
        dark=light(-1.0, 0.0, beside="light"),
        clip=clip | {"beside": "light"},
    ).model_dump()
    tree["evaluation"]["guards"] = guards
    return config_from_dict(tree, source="test")


def weights_of(run_dir: Path) -> list[float]:
    """Of light, in each update."""
    return [record.get("reward/light/weight", 2.0) for record in read_metrics(run_dir, "train")]


def test_a_killed_run_lowers_as_the_undisturbed_one(start: Start, tmp_path: Path) -> None:
    whole, killed, plain = (tmp_path / name for name in ("whole", "killed", "plain"))
    undisturbed, without = start(config_in(whole)), start(config_in(plain, {}))
    disturbed = start(config_in(killed))
    wait_until(
        lambda: min(weights_of(killed), default=2.0) < 2.0 or disturbed.process.poll() is not None,
        "a lowered weight",
    )
    disturbed.kill()
    done = len(weights_of(killed))
    for command in (undisturbed, without):
        assert command.wait() == 0, command.text
    assert 0 < done < 5, disturbed.text
    resumed = start(config_in(killed), "--resume", "auto")
    assert resumed.wait() == 0, resumed.text
    assert_same_bits(killed, whole)
    weights = weights_of(whole)
    assert weights[0] == 2.0
    assert weights[-1] < 2.0
    assert "the weight of light is lowered to 0.5 of rewards.light.weight" in undisturbed.text
    # The lowered weight is what was trained with: without the guard the rewards end elsewhere.
    ends = [read_metrics(folder, "evaluation")[-1]["heldout/light"] for folder in (whole, plain)]
    assert ends[0] != ends[1]
