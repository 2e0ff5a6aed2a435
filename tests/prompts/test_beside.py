"""Embeddings beside a prompt file: taken where they are the run's own encoders', else not."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from g2rpo_ray.cli import main
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, save_config
from g2rpo_ray.doctor.checks.prompts import check_prompts
from g2rpo_ray.doctor.findings import Level
from g2rpo_ray.prompts.dataset import EmbeddedPrompts, embeddings_of, evenly, read_config_prompts
from g2rpo_ray.prompts.formats import PromptFileError
from g2rpo_ray.training import roles
from g2rpo_ray.training.roles import Encoder
from tests.tiny import encode, tiny_config


@pytest.fixture
def copied(tmp_path: Path) -> Config:
    """Of a copy of the tiny world's prompt files, with what lies beside them."""
    shutil.copytree(resolve_path("tiny_world:prompts"), tmp_path / "prompts")
    files = [f"prompts.{name}={tmp_path}/prompts/{name}.txt" for name in ("train", "heldout")]
    return tiny_config(tmp_path / "run", *files)


def test_the_tiny_worlds_prompts_are_embedded(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    embedded = EmbeddedPrompts(config)
    for path in (config.prompts.train, config.prompts.heldout):
        texts = read_config_prompts(config, path)
        assert all(embedded.get(text) for text in texts)
        some = evenly(texts, 3)
        for text, made in zip(some, encode(config, some), strict=True):
            stored = embedded.get(text)
            assert stored is not None
            for name, tensor in made.embeds.tensors.items():
                # To the bit on the machine that made them.
                torch.testing.assert_close(stored[name], tensor)


@pytest.mark.parametrize("change", ["prompts.max_sequence_length=9", "model.dtype=bfloat16"])
def test_those_of_other_encoders_are_not_taken(change: str, tmp_path: Path) -> None:
    embedded = EmbeddedPrompts(tiny_config(tmp_path, change))
    assert (embedded.train, embedded.heldout) == (False, False)


def test_where_the_model_is_not_yet_there_none_are_taken(tmp_path: Path) -> None:
    """As of a plan that is made before the download."""
    config = tiny_config(tmp_path, f"model.path={tmp_path / 'to_come'}")
    assert embeddings_of(config, config.prompts.train) is None
    assert embeddings_of(config, "/") is None


def test_a_damaged_folder_is_named(copied: Config, tmp_path: Path) -> None:
    shard = tmp_path / "prompts" / "train.embeddings" / "shard_00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    last = read_config_prompts(copied, copied.prompts.train)[-1]
    with pytest.raises(PromptFileError, match=r"train.embeddings.*checksum of prompt .* differs"):
        EmbeddedPrompts(copied).get(last)
    shard.unlink()
    with pytest.raises(PromptFileError, match=r"train.embeddings.*missing"):
        EmbeddedPrompts(copied)


def test_a_damaged_folder_ends_what_looks_before_a_run(
    copied: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "prompts" / "heldout.embeddings" / "manifest.json"
    manifest.write_text(manifest.read_text()[:99])
    config = tmp_path / "config.yaml"
    save_config(copied, config)
    for command in (["train", "--dry-run"], ["plan"]):
        assert main([*command, str(config)]) == 2
        assert f"{manifest}: not readable as a manifest" in capsys.readouterr().err
    (finding,) = check_prompts(copied)
    assert finding.level == Level.FAIL
    assert f"{manifest}: not readable as a manifest" in finding.what


def test_the_doctor_looks_at_prompt_files(copied: Config, tmp_path: Path) -> None:
    assert [finding.level for finding in check_prompts(copied)] == [Level.OK]
    heldout = tmp_path / "prompts" / "heldout.txt"
    heldout.write_text(heldout.read_text() + read_config_prompts(copied, copied.prompts.train)[0])
    (finding,) = check_prompts(copied)
    assert "share 1 prompts" in finding.what
    heldout.unlink()
    (finding,) = check_prompts(copied)
    assert (finding.level, str(heldout) in finding.what) == (Level.FAIL, True)


class Started:
    """Stands for the encoder's actor, and counts how often one is started."""

    def __init__(self) -> None:
        self.count = 0
        self.encode = self.encode_heldout = self

    def __call__(self) -> Any:
        self.count += 1
        return self

    def options(self, **_: object) -> Any:
        return self

    def remote(self, number: int, text: str, *_: object) -> Any:
        return number, text


def test_an_encoder_is_started_for_what_was_not_embedded_alone(
    copied: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles.ray, "put", lambda prompt: prompt)
    known = read_config_prompts(copied, copied.prompts.train)[:2]
    actor = Started()
    encoder = Encoder(copied, actor)
    found: list[Any] = encoder.training(list(enumerate(known)))
    assert [prompt.text for prompt in found] == known
    assert (actor.count, encoder.started) == (0, [])
    # A prompt that was added to the file since.
    assert encoder.training([(7, "a cross")]) == encoder.heldout([(7, "a cross")])
    assert (actor.count, encoder.started) == (1, [actor])


def test_an_encoder_reads_what_is_large(copied: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "READ_BY_DRIVER", 2**20)
    actor = Started()
    Encoder(copied, actor)
    assert actor.count == 1
    shutil.rmtree(resolve_path(copied.prompts.heldout).with_suffix(".embeddings"))
    monkeypatch.undo()
    Encoder(copied, actor)
    assert actor.count == 2
