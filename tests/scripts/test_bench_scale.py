"""scripts/bench_scale.py: its setups are configurations that a run would take."""

import argparse
from pathlib import Path

import pytest

from tests.scripts.loading import load_script


@pytest.mark.parametrize(
    ("setup", "transport"), [("one_card", "object_store"), ("four_cards", "nccl")]
)
def test_a_setup_is_a_valid_configuration(
    setup: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_scale = load_script("bench_scale")
    monkeypatch.setattr("measuring.write_scorer", lambda path: {"checkpoint": str(path)})
    options = argparse.Namespace(setup=setup, tiny=False, heads=None, overrides=[])
    config, _ = bench_scale.make_config(options, tmp_path)
    assert config.weight_transport == transport
    assert config.rewards["hps"].gpus_per_replica > 0
