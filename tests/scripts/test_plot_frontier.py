"""Accelerated completions: the settings that are measured, and the plot of what was found."""

import json
import sys
from pathlib import Path

import pytest

import measuring
from tests.scripts.loading import load_script

HARD = measuring.ROOT / "scripts" / "tiny_world" / "hard_run.yaml"


@pytest.mark.parametrize("path", [None, HARD])
def test_every_variant_is_measured_on_the_cpu_at_the_papers_sampling(path: Path | None) -> None:
    script = load_script("bench_accelerations")
    for variant, settings in script.VARIANTS.items():
        config = script.make_config(variant, path)
        assert {key: getattr(config.rollout, key) for key in settings} == settings
        assert (config.sampling.steps, config.sampling.members) == (16, 12)
        assert config.g2rpo.granularities == [1, 2]
        assert sorted(config.rewards) == ["clip", "hps"]
        assert config.rollout.gpus_per_worker == 0


def test_the_frontier_has_measured_seconds_and_else_planned_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, plot = load_script("plot_frontier"), tmp_path / "frontier.svg"
    variants = {"balanced": 0.99, "fast": 0.98, "frozen_float8": 0.97}
    found = {"variants": {n: {"rank_correlation": value} for n, value in variants.items()}}
    accuracy, seconds = tmp_path / "tiny.json", tmp_path / "rollout.json"
    accuracy.write_text(json.dumps(found))
    seconds.write_text(json.dumps({"engine": {"fast, 1": {"engine_s_per_prompt": 12.5}}}))
    arguments = ["--accuracy", str(accuracy), "--seconds", str(seconds), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["plot_frontier.py", *arguments])
    script.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == "fast: 12.5 s, measured"
    assert printed[1].startswith("balanced: ")
    assert printed[1].endswith("s, planned")
    drawn = plot.read_text()
    assert drawn.startswith("<?xml")
    for name in ("exact", "balanced", "fast"):
        assert f"<!-- {name} -->" in drawn
    assert "<!-- frozen_float8 -->" not in drawn
    # Half of the evaluations, and decodes and scores as before.
    exact_s, balanced_s = (script.planned_s(name, "H200") for name in ("exact", "balanced"))
    assert 0.42 < balanced_s / exact_s < 0.5
