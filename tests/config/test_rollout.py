"""``rollout``: named speeds, and what its attention needs."""

from pathlib import Path

import pytest

from g2rpo_ray.config import load_config, save_config
from g2rpo_ray.config.rollout import SPEEDS
from tests.config.quick import error_of, quickstart


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_speed_is_what_it_sets(speed: str, tmp_path: Path) -> None:
    settings = SPEEDS[speed]
    config = quickstart(f"rollout.speed={speed}")
    assert {key: getattr(config.rollout, key) for key in settings} == settings
    # By hand, or beside it in words that agree, it is the same and has the same name.
    by_hand = [f"rollout.{key}={str(value).lower()}" for key, value in settings.items()]
    same = quickstart(*by_hand)
    assert same.rollout.speed_in_words == config.rollout.speed_in_words
    assert config.rollout.speed_in_words.startswith(speed)
    assert quickstart(f"rollout.speed={speed}", *by_hand) == config
    save_config(config, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == config


def test_settings_that_are_no_named_speed_are_told_without_a_name() -> None:
    assert quickstart().rollout.speed_in_words == "exact"
    words = quickstart("rollout.fp8=true", "rollout.fp8_above_sigma=0.3").rollout.speed_in_words
    assert words == "float8 products above noise level 0.3"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "attention is flash3, for compiled code on Hopper cards, and compile is none with"),
        (
            ("rollout.gpus_per_worker=1", "rollout.compile=false"),
            "and compile is false with gpus_per_worker 1: leave attention out",
        ),
        (
            ("rollout.gpus_per_worker=1",),
            "rollout.attention is flash3 and model.dtype is float32: it has code for bfloat16",
        ),
    ],
)
def test_flash3_is_for_compiled_bfloat16_on_cards(overrides: tuple[str, ...], said: str) -> None:
    asked = "rollout.attention=flash3"
    assert said in error_of(asked, *overrides)
    fine = quickstart(asked, "rollout.gpus_per_worker=0.5", "model.dtype=bfloat16")
    assert fine.rollout.attention == "flash3"


def test_settings_of_runs_before_a_setting_went_are_read() -> None:
    assert quickstart("rollout.thin_completions=false") == quickstart()
