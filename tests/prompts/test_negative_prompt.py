"""The negative prompt in a folder of embeddings: once, with its text, and never another's."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from g2rpo_ray.config import Config
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts import encoder as encoder_module
from g2rpo_ray.prompts.dataset import read_config_prompts
from g2rpo_ray.prompts.embeddings import NEGATIVE_FILE
from g2rpo_ray.prompts.encoder import PromptEncoder, ShardEncoder
from g2rpo_ray.prompts.reading import MANIFEST, PromptFileError
from g2rpo_ray.prompts.selection import Selection
from g2rpo_ray.training import embed as embed_module
from g2rpo_ray.training.embed import EmbedOptions
from tests.models.families.folders import family_config

PROMPTS = ["a red circle", "a blue square", "a cross"]


def embed(config: Config, folder: Path) -> Path:
    """``g2rpo embed`` without Ray."""

    def rows(
        config: Config, folder: Path, shards: dict[int, Sequence[str]], _: EmbedOptions
    ) -> Iterator[dict[str, Any]]:
        encode = ShardEncoder(config, folder, 0)
        yield from (encode({"shard": n, "texts": texts}) for n, texts in shards.items())

    source = folder.with_suffix(".txt")
    source.write_text("\n".join(PROMPTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_module, "ray_cluster", lambda _: nullcontext(True))
        patch.setattr(embed_module, "_await_room", lambda *_: None)
        patch.setattr(embed_module, "_shard_rows", rows)
        embed_module.embed(config, str(source), folder, Selection(), EmbedOptions(shard_size=2))
    return folder


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny SD3, with its usual negative prompt."""
    return embed(family_config("sd3"), tmp_path_factory.mktemp("embedded") / "out")


@pytest.fixture
def folder(embedded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded, tmp_path / "copy"))


def reading(folder: Path, *overrides: str, **options: Any) -> Config:
    return family_config("sd3", f"prompts.train={folder}", *overrides, **options)


def error(config: Config) -> str:
    with pytest.raises(PromptFileError) as caught:
        read_config_prompts(config, config.prompts.train)
    return str(caught.value)


def test_what_is_read_is_what_is_encoded_on_the_fly(
    embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reading(embedded)
    fly = TextEncoder(
        config.model, config.prompts.max_sequence_length, negative=config.sampling.negative_prompt
    )
    monkeypatch.setattr(encoder_module, "TextEncoder", None)
    actor = PromptEncoder(config, [])
    assert sorted(read_config_prompts(config, config.prompts.train)) == sorted(PROMPTS)
    for number, text in enumerate(PROMPTS):
        found, wanted = actor.encode(number, text).embeds, fly.encode(text)
        for a, b in ((found, wanted), (found.opposite, wanted.opposite)):
            assert a.tensors.keys() == b.tensors.keys()
            assert all(torch.equal(a[name], b[name]) for name in b.tensors)


def test_an_encoder_beside_the_folder_guides_by_the_same_text(embedded: Path) -> None:
    config = reading(embedded)
    actor = PromptEncoder(config, [])
    read, encoded = actor.encode(0, PROMPTS[0]), actor.encode(1, "a text that is not there")
    assert torch.equal(read.embeds.opposite["joint"], encoded.embeds.opposite["joint"])


def test_a_folder_for_another_negative_prompt_is_refused(embedded: Path) -> None:
    found = error(reading(embedded, negative_prompt="blurry"))
    assert "embeddings with negative prompt 'a blue square'" in found
    assert "sampling.negative_prompt is 'blurry'" in found


def test_without_guidance_any_folder_will_do_and_nothing_is_attached(embedded: Path) -> None:
    config = reading(embedded, "sampling.guidance=1", negative_prompt="")
    read_config_prompts(config, config.prompts.train)
    assert PromptEncoder(config, []).encode(0, PROMPTS[0]).embeds.negative is None


def test_a_folder_without_a_negative_prompt_is_refused_by_guidance(tmp_path: Path) -> None:
    plain = family_config("sd3", "sampling.guidance=1", negative_prompt="")
    made = embed(plain, tmp_path / "out")
    assert not (made / NEGATIVE_FILE).exists()
    assert "embeddings with no negative prompt" in error(reading(made))


def test_a_folder_for_another_family_is_refused_by_name(embedded: Path) -> None:
    config = family_config("flux1_dev", f"prompts.train={embedded}")
    found = error(config)
    assert "embeddings made for a StableDiffusion3Pipeline" in found
    assert "is a FluxPipeline" in found


def test_a_folder_of_before_there_were_negative_prompts_goes_on(tmp_path: Path) -> None:
    config = family_config("flux1_dev")
    made = embed(config, tmp_path / "out")
    manifest = json.loads((made / MANIFEST).read_text())
    for key in ("pipeline", "negative_prompt", "negative_checksum"):
        del manifest[key]
    (made / MANIFEST).write_text(json.dumps(manifest))
    config = family_config("flux1_dev", f"prompts.train={made}")
    assert sorted(read_config_prompts(config, config.prompts.train)) == sorted(PROMPTS)


@pytest.mark.parametrize("content", [None, b"", b"\0" * 64])
def test_a_damaged_negative_prompt_is_named(folder: Path, content: bytes | None) -> None:
    path = folder / NEGATIVE_FILE
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert f"{path}: " in error(reading(folder))


def test_a_flipped_bit_of_the_negative_prompt_is_found(folder: Path) -> None:
    path = folder / NEGATIVE_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert f"{path}: damaged: its checksum differs" in error(reading(folder))
