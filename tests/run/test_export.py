"""Exported weights in a plain diffusers pipeline, and every kind of weights in ``g2rpo sample``."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file, save_file

from g2rpo_ray.common.files import sole_writer
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, LoraSection
from g2rpo_ray.evaluation.sample import SampleOptions, sample
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo, read_weights
from g2rpo_ray.maths import noise
from g2rpo_ray.models.catalogue import CATALOGUE
from g2rpo_ray.models.loading import ModelFolderError
from g2rpo_ray.models.rounding import Arrived, Rounding
from g2rpo_ray.models.saving import ADAPTER_FILE
from g2rpo_ray.run.export import Exported, ExportError, Form, Layout, export, model_card
from g2rpo_ray.run.paths import RunFolderError
from g2rpo_ray.run.weights import SampleError, trained_kind
from tests.states import make_run
from tests.tiny import CAPTIONS, equal_weights

SEED = 3
KINDS = {
    "full": [],
    # A scale of 2.5, which a loader that ignores alpha would not apply.
    "lora": ["model.lora={rank: 4, alpha: 10.0}"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    return {kind: make_run(tmp_path_factory.mktemp(kind), *o) for kind, o in KINDS.items()}


def draw(
    config: Config,
    checkpoint: str,
    folder: Path,
    trained_steps: int | None = None,
    average: bool = False,
) -> np.ndarray:
    """The first picture of ``g2rpo sample``."""
    options = SampleOptions(
        CAPTIONS[:1], seed=SEED, checkpoint=checkpoint, trained_steps=trained_steps, average=average
    )
    (path,) = sample(config, options, folder)
    return np.asarray(Image.open(path)).astype(int)


def draw_plainly(pipeline: FluxPipeline, config: Config) -> np.ndarray:
    """The same picture by nothing but diffusers."""
    pipeline.set_progress_bar_config(disable=True)
    tokens = (config.sampling.height // 16) * (config.sampling.width // 16)
    picture = pipeline(
        CAPTIONS[0],
        height=config.sampling.height,
        width=config.sampling.width,
        num_inference_steps=config.evaluation.steps,
        guidance_scale=config.sampling.guidance,
        latents=noise.normal((tokens, 64), "sample", SEED, 0)[None],
        max_sequence_length=config.prompts.max_sequence_length,
    ).images[0]
    return np.asarray(picture).astype(int)


def base_pipeline(**parts: object) -> FluxPipeline:
    return FluxPipeline.from_pretrained(resolve_path("tiny_world:flux"), **parts)


def assert_same_picture(first: np.ndarray, second: np.ndarray) -> None:
    # As in tests/models/test_against_diffusers.py: a value on a border may round the other way.
    difference = np.abs(first - second)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01


def test_an_exported_adapter_gives_a_plain_pipeline_the_same_picture(
    runs: dict[str, Config], tmp_path: Path
) -> None:
    config, folder = runs["lora"], tmp_path / "adapter"
    assert export(config, folder).form == "adapter"
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "not to be handed on"
    ours = draw(config, "last", tmp_path / "ours")
    pipeline = base_pipeline()
    base = draw_plainly(pipeline, config)
    pipeline.load_lora_weights(folder)
    assert_same_picture(draw_plainly(pipeline, config), ours)
    assert np.abs(base - ours).max() > 20
    assert_same_picture(draw(config, str(folder), tmp_path / "exported"), ours)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_exported_transformer_gives_a_plain_pipeline_the_same_picture(
    runs: dict[str, Config], tmp_path: Path, kind: str
) -> None:
    config, folder = runs[kind], tmp_path / "transformer"
    form = export(
        config, folder, layout="merged" if kind == "lora" else "diffusers", max_shard_size="2MB"
    ).form
    assert form == ("merged" if kind == "lora" else "full")
    assert len(list(folder.glob("diffusion_pytorch_model-*.safetensors"))) > 1
    ours = draw(config, "last", tmp_path / "ours")
    transformer = FluxTransformer2DModel.from_pretrained(folder)
    assert_same_picture(draw_plainly(base_pipeline(transformer=transformer), config), ours)
    assert_same_picture(draw(config, str(folder), tmp_path / "exported"), ours)


def test_published_weights_are_one_file_without_a_configuration(
    runs: dict[str, Config], tmp_path: Path
) -> None:
    config, folder = runs["full"], tmp_path / "published"
    export(config, folder)
    (folder / "config.json").unlink()
    (folder / "README.md").unlink()
    ours = draw(config, "last", tmp_path / "ours")
    file = folder / "diffusion_pytorch_model.safetensors"
    for number, name in enumerate((folder, file)):
        assert np.array_equal(draw(config, str(name), tmp_path / str(number)), ours)
    # A LoRA run's configuration does for the base model and the schedule.
    assert np.array_equal(draw(runs["lora"], str(file), tmp_path / "lora"), ours)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_hybrid_pictures_lie_between_trained_and_base(
    runs: dict[str, Config], tmp_path: Path, kind: str
) -> None:
    config = runs[kind]
    trained, base = draw(config, "last", tmp_path / "t"), draw(config, "base", tmp_path / "b")
    none = draw(config, "last", tmp_path / "0", trained_steps=0)
    every = draw(config, "last", tmp_path / "4", trained_steps=4)
    half = draw(config, "last", tmp_path / "2", trained_steps=2)
    assert np.array_equal(none, base)
    assert np.array_equal(every, trained)
    assert not np.array_equal(half, base)
    assert not np.array_equal(half, trained)


def test_the_moving_average_is_drawn_and_exported(runs: dict[str, Config], tmp_path: Path) -> None:
    config, folder = runs["full"], tmp_path / "average"
    average = draw(config, "last", tmp_path / "ours", average=True)
    assert not np.array_equal(average, draw(config, "last", tmp_path / "last"))
    export(config, folder, average=True)
    assert_same_picture(draw(config, str(folder), tmp_path / "exported"), average)
    with pytest.raises(SampleError, match="is no checkpoint of a run"):
        draw(config, str(folder), tmp_path / "other", average=True)


def test_more_hybrid_steps_than_there_are(runs: dict[str, Config], tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="allowed: 0 to 4"):
        draw(runs["full"], "last", tmp_path, trained_steps=5)


def test_the_card_names_recipe_data_and_use(runs: dict[str, Config], tmp_path: Path) -> None:
    export(runs["lora"], tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    for text in (
        "pipeline.load_lora_weights",
        "shift=3",
        "lora rank 4 alpha 10",
        "7 iterations",
        "tiny_world:prompts/train.txt",
        "trained with g2rpo",
        "these weights were not evaluated",
    ):
        assert text in card


def test_the_card_shows_the_scores_of_these_weights_alone(
    runs: dict[str, Config], tmp_path: Path
) -> None:
    config = runs["full"].model_copy(update={"run_dir": str(tmp_path / "run")})
    shutil.copytree(runs["full"].run_dir, config.run_dir)
    scores = {0: 0.11, 7: 0.22, 9: 0.33}
    lines = [
        {"iteration": n, "kind": "evaluation", "heldout/clip": score} for n, score in scores.items()
    ]
    metrics = Path(config.run_dir, "metrics.jsonl")
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def card(name: str, checkpoint: str = "last", average: bool = False) -> str:
        export(config, tmp_path / name, checkpoint, average=average)
        return (tmp_path / name / "README.md").read_text()

    # The run went on to iteration 9; what is exported is of iteration 7.
    last = card("last")
    assert "| clip | 0.1100 | 0.2200 |" in last.replace(" (not trained on)", "")
    assert "0.33" not in last
    foreign = checkpoint_folder(Path(runs["full"].run_dir), 7)
    for other in (card("average", average=True), card("foreign", str(foreign))):
        assert "these weights were not evaluated" in other
        assert "0.22" not in other
    metrics.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], lines[2])))
    assert "these weights were not evaluated" in card("unseen")


def test_the_card_names_the_modules_that_were_trained(runs: dict[str, Config]) -> None:
    config, exported = runs["full"], Exported("full", torch.float32, Arrived())
    model = config.model.model_copy(update={"trained_modules": ["attn.to_q", "attn.to_k"]})
    cards = {
        kind: model_card(config, CheckpointInfo(7, 7, 7, 100, 1.0, kind, 0), exported).text
        for kind in (trained_kind(config.model), trained_kind(model))
    }
    whole, part = cards.values()
    assert "A transformer, all of whose weights were trained." in whole
    assert "of whose weights those of attn.to_q, attn.to_k were trained." in part


@pytest.mark.parametrize(("form", "relation"), [("adapter", "adapter"), ("merged", "finetune")])
def test_the_hub_reads_what_kind_of_model_it_is(
    runs: dict[str, Config], tmp_path: Path, form: Form, relation: str
) -> None:
    config = runs["lora"]
    folder = tmp_path / "FLUX.1-dev"
    folder.symlink_to(resolve_path(config.model.path))
    model = config.model.model_copy(update={"path": str(folder)})
    info = CheckpointInfo(7, 7, 7, 100, 1.0, trained_kind(model), 0)
    exported = Exported(form, torch.float32, Arrived())
    card = model_card(config.model_copy(update={"model": model}), info, exported)
    card.save(tmp_path / "README.md")
    head = ModelCard.load(tmp_path / "README.md").data
    assert (head.library_name, head.pipeline_tag) == ("diffusers", "text-to-image")
    assert (head.base_model, head["base_model_relation"]) == (
        CATALOGUE["FLUX.1-dev"].repo,
        relation,
    )
    assert (head.license, head.license_name) == ("other", "flux-1-dev-non-commercial-license")
    assert ("lora" in head.tags) == (form == "adapter")
    assert "base_model" not in model_card(config, info, exported).data.to_dict(), (
        "no model of the hub"
    )


def test_the_base_model_is_not_exported(runs: dict[str, Config], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"--checkpoint base: .*model\.path.* last, best"):
        export(runs["full"], tmp_path / "out", checkpoint="base")
    assert not (tmp_path / "out").exists()


def test_a_place_for_pictures_that_cannot_be_written_is_named_before_anything_is_loaded(
    runs: dict[str, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g2rpo_ray.evaluation.sample.load_source", None)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SampleError, match=r"--out .*/file: cannot be written: "):
        draw(runs["full"], "last", tmp_path / "file")
    (tmp_path / "file").unlink()

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("g2rpo_ray.common.files.TemporaryFile", refuse)
    with pytest.raises(SampleError, match="Permission denied"):
        draw(runs["full"], "last", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_large_pictures_are_drawn_in_tiles(
    runs: dict[str, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled, decode = [], AutoencoderKL.tiled_decode

    def watched(vae: AutoencoderKL, latents: torch.Tensor, **options: bool) -> object:
        tiled.append(latents.shape)
        return decode(vae, latents, **options)

    monkeypatch.setattr(AutoencoderKL, "tiled_decode", watched)
    rollout = runs["full"].rollout.model_copy(update={"decode_tile_above_px": 64})
    sampling = runs["full"].sampling.model_copy(update={"height": 80})
    config = runs["full"].model_copy(update={"rollout": rollout, "sampling": sampling})
    draw(config, "base", tmp_path)
    assert tiled


def test_a_small_update_that_rounding_loses_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Merged to the nearest bfloat16 most is lost; of the adapter, and in float32, nothing."""
    config = make_run(tmp_path / "run", *KINDS["lora"], "model.dtype=bfloat16", moved=1e-4)
    score = {"iteration": 7, "kind": "evaluation", "heldout/clip": 0.2}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(score) + "\n")
    ways: dict[str, tuple[Layout, Rounding]] = {
        "adapter": ("diffusers", "nearest"),
        "nearest": ("merged", "nearest"),
        "stochastic": ("merged", "stochastic"),
        "again": ("merged", "stochastic"),
        "float32": ("merged", "none"),
    }
    found = {}
    for way, (layout, rounding) in ways.items():
        caplog.clear()
        found[way] = export(config, tmp_path / way, layout=layout, rounding=rounding).arrived
        assert ("of the trained update was lost" in caplog.text) == (way == "nearest")
        card = (tmp_path / way / "README.md").read_text()
        assert str(found[way]) in card
        # The run was judged with the adapter beside the weights.
        assert ("these weights were not evaluated" in card) == (way == "nearest")
    shares = {way: arrived.share for way, arrived in found.items()}
    assert shares.pop("nearest") < 0.3
    assert shares == pytest.approx(dict.fromkeys(shares, 1.0), abs=0.01)
    assert found["nearest"].changed < 0.1 * found["nearest"].weights
    assert found["adapter"].cosine > 0.9999 < found["float32"].cosine
    file = "diffusion_pytorch_model.safetensors"
    seeded, again = ((tmp_path / way / file).read_bytes() for way in ("stochastic", "again"))
    assert seeded == again
    # What the file holds is what was counted.
    written = load_file(tmp_path / "nearest" / file)
    base = load_file(resolve_path(config.model.path) / "transformer" / file)
    moved = [(written[n].float() - base[n].bfloat16().float()).count_nonzero() for n in base]
    assert int(sum(moved)) == found["nearest"].changed
    assert {t.dtype for t in load_file(tmp_path / "float32" / file).values()} == {torch.float32}


def test_all_weights_in_float32_are_those_that_the_optimizer_has(tmp_path: Path) -> None:
    config = make_run(tmp_path / "run", "model.dtype=bfloat16", moved=1e-4)
    nearest = export(config, tmp_path / "nearest").arrived
    exact = export(config, tmp_path / "float32", rounding="none").arrived
    assert (nearest.is_lost, exact.is_lost) == (True, False)
    written = load_file(tmp_path / "float32" / "diffusion_pytorch_model.safetensors")
    weights = read_weights(checkpoint_folder(Path(config.run_dir), 7))
    assert equal_weights(written, weights)
    assert "torch_dtype=torch.float32" in (tmp_path / "float32" / "README.md").read_text()


def test_a_folder_that_is_there_is_not_touched(runs: dict[str, Config], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ExportError, match="is there already"):
        export(runs["full"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_a_killed_export_left_is_told_and_of_the_same_name_taken(
    runs: dict[str, Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("same", "killed", "running"):
        (tmp_path / f".{name}.writing").mkdir()
        (tmp_path / f".{name}.writing" / "half.safetensors").touch()
    with sole_writer(tmp_path / ".running.writing", ExportError, "--to"):
        export(runs["lora"], tmp_path / "same")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"same", ".killed.writing", ".running.writing"}
    assert not (tmp_path / "same" / "half.safetensors").exists()
    told = [record.getMessage() for record in caplog.records if "killed" in record.getMessage()]
    assert told == [f"{tmp_path}/.killed.writing: left by an export that was killed; remove it"]


def test_a_place_that_refuses_leaves_nothing(
    runs: dict[str, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FluxTransformer2DModel, "save_pretrained", refuse)
    with pytest.raises(ExportError, match=r"out: cannot be written: .*Permission denied"):
        export(runs["full"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_all_weights_have_nothing_to_merge(runs: dict[str, Config], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--merged is for LoRA runs"):
        export(runs["full"], tmp_path / "out", layout="merged")
    with pytest.raises(ExportError, match="--format comfyui is for adapters"):
        export(runs["full"], tmp_path / "out", layout="comfyui")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["comfyui", "kohya", "peft"])
def test_an_adapter_in_other_names_draws_the_same_picture(
    runs: dict[str, Config], tmp_path: Path, layout: Layout
) -> None:
    config, folder = runs["lora"], tmp_path / "adapter"
    assert export(config, folder, layout=layout).form == "adapter"
    ours = draw(config, "last", tmp_path / "ours")
    assert_same_picture(draw(config, str(folder), tmp_path / "exported"), ours)
    assert "strength 1 is what was trained" in (folder / "README.md").read_text()


def test_an_adapter_for_other_modules_is_named(runs: dict[str, Config], tmp_path: Path) -> None:
    tensors = {
        f"transformer.blocks.0.attn.qkv.lora_{part}.weight": torch.zeros(4, 4) for part in "AB"
    }
    save_file(tensors, tmp_path / ADAPTER_FILE)
    with pytest.raises(ModelFolderError, match=r"blocks\.0\.attn\.qkv .* belongs to another"):
        draw(runs["lora"], str(tmp_path), tmp_path / "out")


@pytest.mark.parametrize("damage", ["half a pair", "whole numbers"])
def test_an_adapter_that_would_bind_in_part_is_refused(
    runs: dict[str, Config], tmp_path: Path, damage: str
) -> None:
    export(runs["lora"], tmp_path / "adapter")
    file = tmp_path / "adapter" / ADAPTER_FILE
    tensors = load_file(file)
    first = min(tensors)
    if damage == "half a pair":
        del tensors[first]
    else:
        tensors[first] = tensors[first].to(torch.int8)
    save_file(tensors, file)
    with pytest.raises(ModelFolderError, match=re.escape(first.removesuffix(".lora_A.weight"))):
        draw(runs["lora"], str(file), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_an_adapter_is_known_by_what_it_holds(runs: dict[str, Config], tmp_path: Path) -> None:
    export(runs["lora"], tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    expected = draw(runs["lora"], str(tmp_path / "adapter"), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "my_style_v1.safetensors"
    comfy = {n.replace("transformer.", "diffusion_model.", 1): t for n, t in tensors.items()}
    for content in (tensors, comfy):
        save_file(content, file)
        for number, path in enumerate((file, file.parent)):
            found = draw(runs["full"], str(path), tmp_path / str(number))
            assert np.array_equal(found, expected)


def test_a_transformer_in_other_names_is_told(runs: dict[str, Config], tmp_path: Path) -> None:
    file = tmp_path / "flux1-dev.safetensors"
    save_file({"double_blocks.0.img_attn.qkv.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ModelFolderError, match=r"otherwise than Flux.*from_single_file"):
        draw(runs["full"], str(file), tmp_path / "out")


def test_damaged_and_foreign_transformers_are_named(
    runs: dict[str, Config], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    export(runs["full"], folder, max_shard_size="2MB")
    shards = sorted(folder.glob("diffusion_pytorch_model-*"))
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-10])
    with pytest.raises(ModelFolderError, match="cut short"):
        draw(runs["full"], str(folder), tmp_path / "a")
    shards[0].unlink()
    with pytest.raises(ModelFolderError, match=f"{shards[0].name}: missing"):
        draw(runs["full"], str(folder), tmp_path / "a")
    shards[0].write_bytes(whole)
    tensors = load_file(shards[0])
    name = next(iter(tensors))
    save_file({n: t for n, t in tensors.items() if n != name}, shards[0])
    with pytest.raises(ModelFolderError, match=f"1 tensors are missing.* first {name}"):
        draw(runs["full"], str(folder), tmp_path / "a")


def test_checkpoints_of_the_other_kind_do_not_bind(runs: dict[str, Config], tmp_path: Path) -> None:
    lora_checkpoint = checkpoint_folder(Path(runs["lora"].run_dir), 7)
    copy = shutil.copytree(lora_checkpoint, tmp_path / "iteration_000007")
    # The same tensors at another scale bind without a word.
    scaled = LoraSection(rank=4, alpha=20.0)
    other_scale = runs["lora"].model.model_copy(update={"lora": scaled})
    for config in (runs["full"], runs["lora"].model_copy(update={"model": other_scale})):
        kinds = rf"'lora rank 4 alpha 10' weights, .* '{trained_kind(config.model)}'"
        with pytest.raises(RunFolderError, match=kinds):
            export(config, tmp_path / "out", checkpoint=str(copy))
        with pytest.raises(RunFolderError, match=kinds):
            draw(config, str(copy), tmp_path / "pictures")


def test_what_was_trained_beside_8_bits_is_exported_for_the_model_itself(
    runs: dict[str, Config], tmp_path: Path
) -> None:
    plain = runs["lora"]
    model = plain.model.model_copy(update={"frozen_dtype": "float8"})
    config = plain.model_copy(update={"model": model})
    layouts: tuple[Layout, ...] = ("diffusers", "merged")
    for layout in layouts:
        exported = export(config, tmp_path / layout, layout=layout)
        export(plain, tmp_path / f"plain_{layout}", layout=layout)
        files = {path.name for path in (tmp_path / layout).glob("*.safetensors")}
        assert len(files) == 1
        weights = [load_file(tmp_path / f"{p}{layout}" / min(files)) for p in ("", "plain_")]
        assert equal_weights(*weights)
        assert "in float8 (model.frozen_dtype), as the run drew" in exported.rounded_base
        assert exported.rounded_base in (tmp_path / layout / "README.md").read_text()
    assert "float8" not in (tmp_path / "plain_merged" / "README.md").read_text()
    # Samples have the run's base by default; whole weights of another file are drawn as they are.
    for checkpoint in ("base", "last", str(tmp_path / "diffusers"), str(tmp_path / "merged")):
        eight, full = (draw(c, checkpoint, tmp_path / "drawn") for c in (config, plain))
        assert (checkpoint == str(tmp_path / "merged")) is bool((eight == full).all()), checkpoint
