"""scripts/bench_rollout.py: what it measures on a card are settings that a run would take."""

from pathlib import Path

import pytest

from g2rpo_ray.config.rollout import RolloutSection
from tests.scripts.loading import load_script


def test_every_variant_at_true_size_is_a_valid_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load_script("bench_rollout")
    scorer = {"checkpoint": str(tmp_path / "scorer.pt"), "architecture": "ViT-H-14"}
    monkeypatch.setattr("measuring.write_scorer", lambda _: scorer)
    config = bench.make_config(tmp_path, False, ["rollout.attention=flash3"])
    shares = [reward.gpus_per_replica for reward in config.rewards.values()]
    assert config.rollout.gpus_per_worker + sum(shares) == pytest.approx(1.0)
    for settings in bench.VARIANTS.values():
        RolloutSection.model_validate(config.rollout.model_dump() | settings)
