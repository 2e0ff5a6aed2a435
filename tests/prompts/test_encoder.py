"""A run's encoder: held-out prompts are encoded once, and what is trained on goes first."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from g2rpo_ray.common.files import DiskError
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.prompts import encoder as encoder_module
from g2rpo_ray.prompts.dataset import Prompt, read_config_prompts
from g2rpo_ray.prompts.encoder import EncoderActor, PromptEncoder
from tests.models.families.folders import family_config
from tests.tiny import CAPTIONS, encode, tiny_config

UNKNOWN = "a cross"
"""No prompt of the tiny world, whose embeddings ship with its prompt files."""


def made_in(kept: Path) -> set[Path]:
    return set(kept.glob("*"))


def equal(first: Conditioning, second: Conditioning) -> bool:
    """To rounding: those that ship with the tiny world were made on another processor."""
    return first.tensors.keys() == second.tensors.keys() and all(
        torch.allclose(first[name], second[name], rtol=1e-4, atol=1e-5) for name in second.tensors
    )


@pytest.mark.parametrize("family", ["flux1_dev", "sd3", "qwen_image"])
def test_heldout_prompts_are_encoded_once_a_run(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, kept = family_config(family), tmp_path / "embeddings"
    wanted = [prompt.embeds for prompt in encode(config)]
    first = PromptEncoder(config, [kept])
    made = [first.encode_heldout(n, text).embeds for n, text in enumerate(CAPTIONS)]
    # The run goes on, or is evaluated: the encoders are not even loaded.
    monkeypatch.setattr(encoder_module, "TextEncoder", None)
    later = PromptEncoder(config, [kept, tmp_path / "other"])
    read = [later.encode_heldout(n, text).embeds for n, text in enumerate(CAPTIONS)]
    for one, two, on_the_fly in zip(made, read, wanted, strict=True):
        assert equal(one, on_the_fly)
        assert equal(two, on_the_fly)
        if on_the_fly.negative is None:
            assert one.negative is two.negative is None
        else:
            assert equal(one.opposite, on_the_fly.opposite)
            assert equal(two.opposite, on_the_fly.opposite)
    assert not (tmp_path / "other").exists()


def test_what_is_cut_is_counted_where_it_is_encoded(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "prompts.max_sequence_length=6")
    encoder = PromptEncoder(config, [tmp_path / "kept"])
    assert len(encoder.cut([*CAPTIONS, "a cat"])) == len(CAPTIONS)
    encoder.encode_heldout(0, CAPTIONS[0])
    # Told in the life that made it, and where it was embedded.
    assert len(encoder.cut([*CAPTIONS, "a cat"])) == len(CAPTIONS) - 1
    embedded = tiny_config(tmp_path / "run")
    known = read_config_prompts(embedded, embedded.prompts.train)
    assert PromptEncoder(embedded, [tmp_path / "kept"]).cut(known) == []


@pytest.mark.parametrize("change", ["prompts.max_sequence_length=9", "model.dtype=bfloat16"])
def test_embeddings_of_other_settings_are_not_taken(change: str, tmp_path: Path) -> None:
    kept = tmp_path / "embeddings"
    PromptEncoder(family_config("sd3"), [kept]).encode_heldout(0, CAPTIONS[0])
    before, other = made_in(kept), family_config("sd3", change)
    found = PromptEncoder(other, [kept]).encode_heldout(0, CAPTIONS[0]).embeds
    assert equal(found, encode(other)[0].embeds)
    assert len(made_in(kept)) == 2 * len(before)


def test_embeddings_of_other_encoders_are_not_taken(tmp_path: Path) -> None:
    kept = tmp_path / "embeddings"
    for family in ("flux1_dev", "sd3"):
        config = family_config(family)
        found = PromptEncoder(config, [kept]).encode_heldout(0, CAPTIONS[0]).embeds
        assert equal(found, encode(config)[0].embeds)


@pytest.mark.parametrize("place", [-1, 30])
def test_a_damaged_file_is_made_again(
    place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, kept = family_config("flux1_dev"), tmp_path / "embeddings"
    PromptEncoder(config, [kept]).encode_heldout(0, UNKNOWN)
    (path,) = made_in(kept)
    broken = bytearray(path.read_bytes())
    broken[place] ^= 1
    path.write_bytes(broken)
    wanted = encode(config, [UNKNOWN])[0].embeds
    assert equal(PromptEncoder(config, [kept]).encode_heldout(0, UNKNOWN).embeds, wanted)
    assert f"{path}: damaged, it is made again" in caplog.text
    monkeypatch.setattr(encoder_module, "TextEncoder", None)
    assert equal(PromptEncoder(config, [kept]).encode_heldout(0, UNKNOWN).embeds, wanted)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    encoder = PromptEncoder(family_config("flux1_dev"), [tmp_path / "embeddings"])
    with pytest.raises(DiskError, match=r"embeddings.*No space left on device"):
        encoder.encode_heldout(0, UNKNOWN)
    assert made_in(tmp_path / "embeddings") == set()


@pytest.mark.parametrize(("threads", "expected"), [("null", 2), ("3", 3)])
def test_the_encoder_has_threads_of_its_own(
    threads: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, "rollout.threads=2", f"prompts.encoder_threads={threads}")
    seen = []

    def look(_encoder: PromptEncoder, number: int, text: str) -> Prompt:
        seen.append(torch.get_num_threads())
        return Prompt(number, text, Conditioning({}))

    monkeypatch.setattr(PromptEncoder, "encode", look)
    asyncio.run(EncoderActor(config, []).encode(0, "", 0))
    assert seen == [expected]


def test_what_is_trained_on_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    begun, asked = threading.Event(), threading.Event()

    def slow(_encoder: PromptEncoder, number: int, text: str) -> Prompt:
        begun.set()
        assert asked.wait(300)
        order.append(number)
        return Prompt(number, text, Conditioning({}))

    monkeypatch.setattr(PromptEncoder, "encode", slow)
    monkeypatch.setattr(PromptEncoder, "encode_heldout", slow)

    async def ask() -> None:
        actor = EncoderActor(tiny_config(tmp_path), [])
        heldout = [asyncio.create_task(actor.encode_heldout(n, "")) for n in range(100, 110)]
        await asyncio.to_thread(begun.wait, 300)
        # In any order, as Ray brings them.
        training: list[Any] = [
            asyncio.create_task(actor.encode(n, "", place=n)) for n in (2, 0, 3, 1)
        ]
        await asyncio.sleep(0)
        asked.set()
        await asyncio.gather(*training, *heldout)

    asyncio.run(ask())
    # The one that was begun is not left half done.
    assert order == [100, 0, 1, 2, 3, *range(101, 110)]


def test_an_error_reaches_who_has_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_encoder: PromptEncoder, _number: int, text: str) -> Prompt:
        if text == "bad":
            raise DiskError("no room")
        return Prompt(0, text, Conditioning({}))

    monkeypatch.setattr(PromptEncoder, "encode", full)

    async def ask() -> None:
        actor = EncoderActor(tiny_config(tmp_path), [])
        with pytest.raises(DiskError, match="no room"):
            await actor.encode(0, "bad", 0)
        assert (await actor.encode(1, "good", 1)).text == "good"

    asyncio.run(ask())
