"""Settings on the command line replace the file's."""

import pytest

from tests.config.quick import error_of, quickstart


def test_overrides_reach_into_sections_and_make_new_ones() -> None:
    config = quickstart("learner.ranks=1", "model.lora.rank=4", "g2rpo.sde_steps=[0, 2]", "seed=3")
    assert config.learner.ranks == 1
    assert config.model.lora is not None
    assert config.model.lora.rank == 4
    assert config.g2rpo.sde_steps == [0, 2]
    assert config.seed == 3
    assert config.sampling == quickstart().sampling


def test_the_last_of_two_overrides_counts() -> None:
    assert quickstart("seed=1", "seed=2").seed == 2


def test_a_value_may_hold_an_equals_sign() -> None:
    assert quickstart("run_dir=runs/lr=1e-4").run_dir == "runs/lr=1e-4"


@pytest.mark.parametrize(
    ("value", "path"), [("/runs/one two#3", "/runs/one two#3"), ('"/runs/try #2"', "/runs/try #2")]
)
def test_a_path_may_hold_blanks_and_hashes(value: str, path: str) -> None:
    assert quickstart(f"run_dir={value}").run_dir == path


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed", "expected key.sub=value"),
        ("=3", "expected key.sub=value"),
        ("seed.of=3", "seed is no section"),
        ("seed=[1", "not valid YAML"),
        ("run_dir=/runs/try #2", "begins a comment"),
        ("seed=1 # as before", "begins a comment"),
        ("run_dir=#2", "begins a comment"),
        ("run_dir=one\ntwo", "a line break inside a value is a blank in YAML; write \\n in double"),
        ("run_dir='one\ntwo'", "a line break"),
        ("tracking={wandb_project: one\ntwo}", "a line break"),
    ],
)
def test_override_of_wrong_form(override: str, named: str) -> None:
    message = error_of(override)
    assert repr(override) in message
    assert named in message


@pytest.mark.parametrize(
    ("override", "key"),
    [("a=nosuch", "a: unknown key"), ("run_dir=''", "run_dir: String should have at least 1"),
     ("model.path=''", "model.path: String should"), ("prompts.train=''", "prompts.train: String"),
     ("prompts.heldout=''", "prompts.heldout: String should")],
)  # fmt: skip
def test_the_message_says_that_it_came_by_an_override(override: str, key: str) -> None:
    message = error_of("seed=3", "seed=4", override)
    head, _, lines = message.partition(":\n  ")
    assert "quickstart.yaml with overrides of " in head
    assert head.endswith(f", seed, {override.partition('=')[0]}")
    assert lines.startswith(key)


def test_line_breaks_that_are_kept_or_between_values_are_allowed() -> None:
    assert quickstart('run_dir="one\\ntwo"').run_dir == "one\ntwo"
    assert quickstart("run_dir=|-\n  one\n  two").run_dir == "one\ntwo"
    assert quickstart("g2rpo.sde_steps=[0,\n 2]", "seed=3\n").g2rpo.sde_steps == [0, 2]
