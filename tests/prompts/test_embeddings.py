"""g2rpo embed on the tiny encoders: the numbers of on the fly; nothing damaged or foreign."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from g2rpo_ray.cluster import placement
from g2rpo_ray.cluster.demand import ClusterError
from g2rpo_ray.common.errors import RunError
from g2rpo_ray.common.files import DiskError
from g2rpo_ray.config import Config
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.fingerprint import folder_fingerprint
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts import encoder as encoder_module
from g2rpo_ray.prompts.dataset import read_config_prompts
from g2rpo_ray.prompts.embeddings import Embeddings, prompt_checksum, stacked
from g2rpo_ray.prompts.encoder import PromptEncoder
from g2rpo_ray.prompts.formats import PromptFileError
from g2rpo_ray.prompts.reading import MANIFEST
from g2rpo_ray.prompts.selection import Selection
from g2rpo_ray.training import embed as embed_module
from g2rpo_ray.training.embed import EmbedError, EmbedOptions, embed
from tests.tiny import copy_flux, reshard, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

PROMPTS = ["a red circle", "红色圆圈", "قطة", "a 🐈‍⬛", "a blue square", "a red circle", "a cross"]
OPTIONS = EmbedOptions(workers=2, cpus_per_worker=0.5, shard_size=3)
ONE = replace(OPTIONS, workers=1)
"""Their number changes nothing of what is written, and each takes seconds to start."""


def text_file(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of embeddings that no test changes."""
    folder = tmp_path_factory.mktemp("embedded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_module, "ray_cluster", lambda _: nullcontext(True))
        source = str(text_file(folder))
        embed(tiny_config(folder), source, folder / "out", Selection(), OPTIONS)
    return folder / "out"


@pytest.fixture
def folder(embedded: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(embedded, tmp_path / "copy"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    monkeypatch.setattr(embed_module, "ray_cluster", lambda _: nullcontext(True))
    return embed


def config_with(folder: Path, *overrides: str) -> Config:
    return tiny_config(folder, f"prompts.train={folder}", *overrides)


@pytest.mark.usefixtures("ray_cluster")
def test_prompts_that_are_cut_are_told_once(
    run: Callable[..., object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("a cat\na red circle left of a green triangle\na dog\n" + "a red cat " * 9)
    config = tiny_config(tmp_path, "prompts.max_sequence_length=6")
    run(config, str(source), tmp_path / "out", Selection(), replace(ONE, shard_size=1))
    (told,) = [
        t for t in capsys.readouterr().out.splitlines() if "prompts.max_sequence_length" in t
    ]
    assert told.startswith("2 of 4 prompts are cut: up to ")
    assert "prompts.max_sequence_length is 6" in told


@pytest.mark.parametrize("gpus", [1.5, -1.0, float("nan")])
def test_gpus_that_ray_cannot_give_are_refused_before_anything_starts(gpus: float) -> None:
    with pytest.raises(EmbedError, match=r"--gpus-per-worker: .* GPUs; .* or whole GPUs"):
        EmbedOptions(gpus_per_worker=gpus)


def test_fewer_cpus_than_none_are_refused_before_anything_starts() -> None:
    with pytest.raises(EmbedError, match=r"--cpus-per-worker: -1 CPUs"):
        EmbedOptions(cpus_per_worker=-1.0)


def test_embeddings_are_those_made_on_the_fly_to_the_bit(
    embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(embedded, f"prompts.heldout={embedded}")
    texts = read_config_prompts(config, config.prompts.train)
    assert texts == PROMPTS
    fly = TextEncoder(config.model, config.prompts.max_sequence_length)
    # All prompts were embedded before: the encoders are not even loaded.
    monkeypatch.setattr(encoder_module, "TextEncoder", None)
    actor = PromptEncoder(config, [])
    for number, text in enumerate(texts):
        prompt, wanted = actor.encode(number, text), fly.encode(text)
        assert torch.equal(prompt.embeds["t5"], wanted["t5"])
        assert torch.equal(prompt.embeds["pooled"], wanted["pooled"])
        assert prompt.embeds["t5"].dtype == wanted["t5"].dtype


def test_a_prompt_that_was_not_embedded_is_encoded_on_the_fly(embedded: Path) -> None:
    config = config_with(embedded)
    prompt = PromptEncoder(config, []).encode(0, "a green triangle")
    fly = TextEncoder(config.model, config.prompts.max_sequence_length)
    assert torch.equal(prompt.embeds["t5"], fly.encode("a green triangle")["t5"])


def test_the_manifest_says_what_there_is(embedded: Path) -> None:
    manifest = Embeddings(embedded).manifest
    assert manifest.prompts == len(PROMPTS)
    assert [shard.prompts for shard in manifest.files] == [3, 3, 1]
    assert manifest.max_sequence_length == 10
    assert {path.name for path in embedded.iterdir()} == {
        "manifest.json",
        "prompts.parquet",
        *(shard.file for shard in manifest.files),
    }


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.dtype=bfloat16", "dtype (model.dtype) is float32 there and bfloat16"),
        ("prompts.max_sequence_length=12", "prompts.max_sequence_length is 10 there and 12"),
    ],
)
def test_training_refuses_another_precision_or_length(
    embedded: Path, override: str, named: str
) -> None:
    config = config_with(embedded, override)
    with pytest.raises(PromptFileError) as caught:
        read_config_prompts(config, config.prompts.train)
    assert f"{embedded / 'manifest.json'}: embeddings of another encoder" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2", "tokenizer_2"])
def test_training_refuses_embeddings_of_another_encoder(
    embedded: Path, tmp_path: Path, part: str
) -> None:
    model = copy_flux(tmp_path / "flux")
    name = "tokenizer.json" if part.startswith("tokenizer") else "model.safetensors"
    content = bytearray((model / part / name).read_bytes())
    content[-2] ^= 1
    (model / part / name).write_bytes(content)
    config = config_with(embedded, f"model.path={model}")
    with pytest.raises(PromptFileError, match=rf"another encoder .*{part} is [\w:]+ there"):
        read_config_prompts(config, config.prompts.train)


def test_a_copy_of_the_encoder_elsewhere_is_the_same_encoder(
    embedded: Path, tmp_path: Path
) -> None:
    config = config_with(embedded, f"model.path={copy_flux(tmp_path / 'flux')}")
    assert read_config_prompts(config, config.prompts.train) == PROMPTS


def test_an_encoder_in_other_shards_is_the_same_encoder(embedded: Path, tmp_path: Path) -> None:
    model = copy_flux(tmp_path / "flux")
    reshard(model / "text_encoder_2", "model")
    config = config_with(embedded, f"model.path={model}")
    assert read_config_prompts(config, config.prompts.train) == PROMPTS


def test_embeddings_with_fingerprints_of_files_are_still_known(
    embedded: Path, tmp_path: Path
) -> None:
    folder, model = tmp_path / "embedded", copy_flux(tmp_path / "flux")
    shutil.copytree(embedded, folder)
    content = json.loads((folder / MANIFEST).read_text())
    content["encoder"] = {p: folder_fingerprint(model / p) for p in content["encoder"]}
    (folder / MANIFEST).write_text(json.dumps(content))
    config = config_with(folder, f"model.path={model}")
    assert read_config_prompts(config, config.prompts.train) == PROMPTS
    reshard(model / "text_encoder_2", "model")
    with pytest.raises(PromptFileError, match="another encoder"):
        read_config_prompts(config, config.prompts.train)


def test_a_shard_that_is_cut_short_or_missing_is_named(folder: Path) -> None:
    shard = folder / "shard_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(
        PromptFileError, match=r"shard_00001\.safetensors: damaged shard: \d+ bytes"
    ):
        Embeddings(folder)
    shard.unlink()
    with pytest.raises(PromptFileError, match=r"shard_00001\.safetensors: damaged shard: missing"):
        Embeddings(folder)


def test_one_flipped_bit_is_found_where_it_lies(folder: Path) -> None:
    shard = folder / "shard_00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    embeddings = Embeddings(folder)
    # The last byte belongs to the shard's last row, prompt 5; the others are whole.
    embeddings.embeds(PROMPTS[3])
    with pytest.raises(PromptFileError, match=r"shard_00001\.safetensors, row 2: damaged shard"):
        embeddings.embeds(PROMPTS[5])


@pytest.mark.parametrize("content", ["", "{", '{"format": "g2rpo embeddings 9"}', "[]"])
def test_a_manifest_that_is_none(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(PromptFileError, match=r"manifest\.json: not readable as a manifest"):
        Embeddings(folder)


def test_a_damaged_list_of_prompts_is_named(folder: Path) -> None:
    table = folder / "prompts.parquet"
    table.write_bytes(table.read_bytes()[:-3])
    with pytest.raises(PromptFileError, match=r"prompts\.parquet: missing or damaged"):
        Embeddings(folder)


def test_a_killed_command_goes_on(
    embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]
) -> None:
    real, made = embed_module._shard_rows, []

    def dying(*arguments: object) -> object:
        for row in real(*arguments):  # type: ignore[arg-type]
            made.append(row["shard"])
            yield row
            if len(made) == 1:
                raise RunError("killed")

    monkeypatch.setattr(embed_module, "_shard_rows", dying)
    config, source, out = tiny_config(tmp_path), str(text_file(tmp_path)), tmp_path / "out"
    with pytest.raises(RunError, match="killed"):
        run(config, source, out, Selection(), ONE)
    assert not (out / "manifest.json").exists()
    other = EmbedOptions(shard_size=2)
    with pytest.raises(EmbedError, match="was begun with other shard_size"):
        run(config, source, out, Selection(), other)
    plan = (out / "plan.json").read_text()
    for damaged in ("", "[]"):
        (out / "plan.json").write_text(damaged)
        with pytest.raises(EmbedError, match=r"plan\.json: .*JSON.*; remove the folder"):
            run(config, source, out, Selection(), ONE)
    (out / "plan.json").write_text(plan)
    with (out / "finished.jsonl").open("a") as finished:
        finished.write('{"shard": 1}\n[]\n')
    run(config, source, out, Selection(), ONE)
    assert sorted(made) == [0, 1, 2]
    again, whole = (json.loads((f / "manifest.json").read_text()) for f in (out, embedded))
    assert again["files"] == whole["files"]
    with pytest.raises(EmbedError, match="holds embeddings already, complete"):
        run(config, source, out, Selection(), ONE)


def test_a_full_disk_is_said_before_anything_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskError, match=r"fewer with --limit.* takes \d+ kB, and 1 kB are free"):
        run(tiny_config(tmp_path), str(text_file(tmp_path)), tmp_path / "o", Selection(), OPTIONS)


def test_shards_that_are_written_over_give_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]
) -> None:
    def encode(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("g2rpo_ray.training.embed._encode", encode)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    asked = tiny_config(tmp_path), str(text_file(tmp_path)), tmp_path / "o", Selection(), OPTIONS
    with pytest.raises(DiskError):
        run(*asked)
    # Whole, but the command was killed before it noted them.
    for number in range(len(PROMPTS)):
        (tmp_path / "o" / f"shard_{number:05d}.safetensors").write_bytes(bytes(100_000))
    with pytest.raises(InterruptedError):
        run(*asked)


@pytest.mark.parametrize(
    ("private", "error", "waits"), [(True, EmbedError, False), (False, ClusterError, True)]
)
def test_room_for_the_workers_is_waited_for_where_it_can_come(
    private: bool,
    error: type[Exception],
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(embed_module, "ray_cluster", lambda _: nullcontext(private))
    monkeypatch.setattr(placement, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(placement, "POLL_S", 0.1)
    config = tiny_config(tmp_path, "cluster.start_timeout_s=2")
    options = EmbedOptions(workers=9, cpus_per_worker=5, shard_size=1)
    with pytest.raises(error, match="wants 35 CPU and the cluster has 8: --workers=7 asks for 35"):
        embed(config, str(text_file(tmp_path)), tmp_path / "out", Selection(), options)
    waited = re.search(r"waiting for room, \d of 2 s: wanted 35 CPU", capsys.readouterr().out)
    assert (waited is not None) is waits


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, run: Callable[..., object]
) -> None:
    with pytest.raises(EmbedError, match="not empty; name another folder"):
        run(tiny_config(tmp_path), str(text_file(tmp_path)), tmp_path, Selection(), OPTIONS)


def test_the_checksum_is_that_of_folders_written_before_tensors_had_names() -> None:
    t5, pooled = torch.arange(6.0).reshape(3, 2), torch.tensor([7.0, 8.0])
    old = hashlib.sha256(t5.numpy().tobytes() + pooled.numpy().tobytes()).hexdigest()[:16]
    assert prompt_checksum(Conditioning({"pooled": pooled, "t5": t5})) == old


def test_texts_of_several_lengths_are_read_back_as_they_were(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    made = [
        Conditioning(
            {
                "text": torch.randn(length, 4, generator=generator).bfloat16(),
                "mask": torch.ones(length, dtype=torch.bool),
                "pooled": torch.randn(5, generator=generator).bfloat16(),
            }
        )
        for length in (7, 2, 1)
    ]
    # The same folder, with other tensors in its first shard.
    shard, table = folder / "shard_00000.safetensors", folder / "prompts.parquet"
    save_file(stacked(made), shard)
    rows = pq.read_table(table).to_pylist()
    for row in rows[:3]:
        row["checksum"] = prompt_checksum(made[row["row"]])
    pq.write_table(pa.Table.from_pylist(rows), table)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["bytes"] = shard.stat().st_size
    manifest["prompts_sha256"] = hashlib.sha256(table.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    embeddings = Embeddings(folder)
    # Row 0's text stands in the second shard, too.
    for row in rows[1:3]:
        read, wanted = embeddings.embeds(row["text"]), made[row["row"]]
        assert all(torch.equal(read[name], wanted[name]) for name in ("text", "mask", "pooled"))
