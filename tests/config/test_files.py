"""A configuration file that cannot be read is named, with the line; what is saved reads back."""

from pathlib import Path

import pytest

from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import load_config, save_config
from tests.config.quick import quickstart
from tests.tiny import QUICKSTART


def error_of_text(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def test_missing_file_is_named_with_the_folder_that_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config("configs/quick.yaml")
    assert "configs/quick.yaml: no such configuration file" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_in_place_of_a_file_is_pointed_into(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is a folder.*{tmp_path}/config.yaml"):
        load_config(tmp_path)


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"seed: \xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_not_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    message = error_of_text(tmp_path / "run.yaml", "seed: 1\niterations: [1, 2\n")
    assert "run.yaml: not valid YAML" in message
    assert "line" in message


@pytest.mark.parametrize(
    ("text", "found"), [("- seed\n- 1\n", "['seed', 1]"), ("hello", "'hello'"), ("", "None")]
)
def test_anything_but_settings(tmp_path: Path, text: str, found: str) -> None:
    message = error_of_text(tmp_path / "run.yaml", text)
    assert "run.yaml: expected settings as 'key: value' lines" in message
    assert found in message


def test_doubled_key_is_named_with_its_line(tmp_path: Path) -> None:
    text = QUICKSTART.read_text() + "\nseed: 7\n"
    message = error_of_text(tmp_path / "run.yaml", text)
    assert "key 'seed' stands here twice" in message
    assert f"line {len(text.splitlines())}" in message


@pytest.mark.parametrize("text", ["{{ run_dir }}", "{[a]: b}"])
def test_a_template_that_was_not_filled_in(tmp_path: Path, text: str) -> None:
    message = error_of_text(tmp_path / "run.yaml", f"seed: 1\nrun_dir: {text}\n")
    assert "run.yaml: not valid YAML" in message
    assert "a key must be plain text; is this a template that was not filled in?" in message
    assert "line 2, column 11" in message


def test_what_looks_like_a_date_and_is_none(tmp_path: Path) -> None:
    message = error_of_text(tmp_path / "run.yaml", "run_dir: 2026-11-31\n")
    assert "run.yaml: not valid YAML" in message


def test_missing_setting(tmp_path: Path) -> None:
    lines = QUICKSTART.read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("iterations:"))
    message = error_of_text(tmp_path / "run.yaml", text)
    assert "iterations: missing, it has no default" in message


def test_saved_settings_read_back_equal(tmp_path: Path) -> None:
    config = quickstart("learner.learning_rate=3e-7", "model.lora.rank=4", "run_dir=läufe/eins")
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
