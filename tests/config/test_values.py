"""A wrong key or value is named with what is allowed there."""

from pathlib import Path

import pytest

from g2rpo_ray.config import load_config, save_config
from tests.config.quick import error_of, quickstart
from tests.tiny import QUICKSTART


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("itterations=5", "itterations", "5"),
        ("learner.lr=1", "learner.lr", "1"),
        ("rewards.clip.wait=2", "rewards.clip.wait", "2"),
        ("telemetry.level=high", "telemetry", "{'level': 'high'}"),
    ],
)
def test_unknown_key(override: str, key: str, value: str) -> None:
    message = error_of(override)
    assert f"{key}: unknown key (value {value})" in message
    assert str(QUICKSTART) in message


@pytest.mark.parametrize(
    ("override", "key", "allowed", "found"),
    [
        ("seed=one", "seed", "valid integer", "'one'"),
        ("seed=-1", "seed", "greater than or equal to 0", "-1"),
        # Beyond what PyTorch's generators and the names of checkpoints hold.
        (f"seed={2**63}", "seed", "less than", str(2**63)),
        ("iterations=1000000", "iterations", "less than 1000000", "1000000"),
        ("iterations=1.5", "iterations", "valid integer", "1.5"),
        ("iterations=true", "iterations", "valid integer", "True"),
        ("run_dir=5", "run_dir", "valid string", "5"),
        ("model.dtype=float16", "model.dtype", "'float32' or 'bfloat16'", "'float16'"),
        ("sampling.sde=wiggle", "sampling.sde", "'flow'", "'wiggle'"),
        ("learner.zero_stage=4", "learner.zero_stage", "1, 2 or 3", "4"),
        ("learner.learning_rate=0", "learner.learning_rate", "greater than 0", "0"),
        ("sampling.eta=.inf", "sampling.eta", "finite number", "inf"),
        ("learner.beta1=1", "learner.beta1", "less than 1", "1"),
        ("g2rpo.sde_steps=3", "g2rpo.sde_steps", "valid list", "3"),
        ("g2rpo.sde_steps=[]", "g2rpo.sde_steps", "at least 1 item", "[]"),
        ("rollout=fast", "rollout", "valid dictionary", "'fast'"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(
    override: str, key: str, allowed: str, found: str
) -> None:
    line = next(line for line in error_of(override).splitlines() if line.strip().startswith(key))
    assert line.startswith(f"  {key}: ")
    assert allowed in line
    assert f"(got {found})" in line


def test_every_problem_is_named_at_once() -> None:
    message = error_of("seed=one", "learner.lr=1", "sampling.steps=1")
    assert all(key in message for key in ("seed: ", "learner.lr: ", "sampling.steps: "))


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".1e-3", "+1e-4"])
def test_scientific_notation_is_a_number(text: str) -> None:
    assert quickstart(f"learner.learning_rate={text}").learner.learning_rate == 1e-4


@pytest.mark.parametrize("text", ["1e", "e4", "1e-4x", "'1e-4'"])
def test_what_only_looks_like_a_number_is_refused(text: str) -> None:
    assert "learner.learning_rate: Input should be a valid number" in error_of(
        f"learner.learning_rate={text}"
    )


@pytest.mark.parametrize(("text", "seed"), [("010", 10), ("08", 8), ("0o10", 8), ("0x1F", 31)])
def test_numbers_are_those_of_yaml_1_2(text: str, seed: int) -> None:
    assert quickstart(f"seed={text}").seed == seed


@pytest.mark.parametrize("text", ["1:04", "1_28", "0b11"])
def test_numbers_of_yaml_1_1_alone_are_none(text: str) -> None:
    assert f"seed: Input should be a valid integer (got '{text}')" in error_of(f"seed={text}")


@pytest.mark.parametrize("name", ["08", "010", "0o10", "0x1F", "1e5", "1:04", "1_28", "no", ".5"])
def test_text_that_looks_like_a_number_stays_text_in_a_file(name: str, tmp_path: Path) -> None:
    config = quickstart(f"run_dir='{name}'")
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "override",
    ["rewards=&a {x: *a}", "cluster.environment=&a [*a]", "rewards.hps.options=&a {x: *a}"],
)
def test_settings_that_hold_themselves_are_refused(override: str) -> None:
    assert "Circular reference" in error_of(override)


@pytest.mark.parametrize("text", ["[" * 3000, "{a: " * 1000])
def test_settings_too_deep_to_read_are_refused(text: str) -> None:
    assert "too deep: settings within settings" in error_of(f"sampling.steps={text}")


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        quickstart().seed = 1  # type: ignore[misc]


def test_a_value_of_several_kinds_is_one_line_with_its_key() -> None:
    for override, line in (
        ("model.share_frozen=maybe", "Input should be 'auto', or a valid boolean (got 'maybe')"),
        ("rollout.batch_size=many", "Input should be a valid integer, or 'auto' (got 'many')"),
        ("prompts.key=[1]", "Input should be a valid string, or a valid integer (got [1])"),
    ):
        assert error_of(override).splitlines()[1:] == [f"  {override.partition('=')[0]}: {line}"]
