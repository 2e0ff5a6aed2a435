"""The world of words: its files, its pen, and a base model that PP-OCR can half read."""

from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline

from g2rpo_ray.cli import main
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import RewardScorer
from g2rpo_ray.rewards.scorers.pictures import as_pictures
from g2rpo_ray.rewards.scorers.written_text import wanted_texts
from g2rpo_ray.tiny_world import assets_dir
from tests.integration.command import ROOT
from tiny_world.pictures import PictureSource
from tiny_world.words import check, prompts
from tiny_world.world import World, prepare, spelt, tiny

RECIPE = str(ROOT / "configs" / "words.yaml")
WORDS = assets_dir() / "words"


@pytest.fixture(scope="module")
def pipeline() -> FluxPipeline:
    pipeline = FluxPipeline.from_pretrained(WORDS / "flux")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def ocr() -> RewardScorer:
    pytest.importorskip("rapidocr", reason="needs g2rpo-ray[ocr], which [dev] has")
    return make_scorer("ocr", {"side": 64}, "cpu")


def test_the_words_take_at_most_six_megabytes() -> None:
    assert sum(file.stat().st_size for file in WORDS.rglob("*") if file.is_file()) <= 6_000_000


def test_no_word_is_both_trained_on_and_held_out() -> None:
    train, heldout = prompts("train"), prompts("heldout")
    assert len({*train, *heldout}) == len(train) + len(heldout) == 417
    assert len(heldout) == 64


@pytest.mark.parametrize(("world", "shipped"), [(tiny(), assets_dir()), (spelt(), WORDS)])
def test_a_world_is_prepared_from_its_own_files(
    world: World, shipped: Path, tmp_path: Path
) -> None:
    prepare(world, tmp_path)
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*") if path.is_file()}
    assert {path.parts[0] for path in written} <= {"flux", "clip", "hps", "prompts"}
    for path in written:
        assert (tmp_path / path).read_text() == (shipped / path).read_text()


def test_both_tokenizers_see_every_letter(pipeline: FluxPipeline) -> None:
    for prompt in prompts("train") + prompts("heldout"):
        (word,) = wanted_texts(prompt, None)
        clip, t5 = pipeline.tokenizer.tokenize(prompt), pipeline.tokenizer_2.tokenize(prompt)
        assert [token.removesuffix("</w>") for token in clip[-1 - len(word) : -1]] == list(word)
        assert t5 == ["▁the", "▁word", '▁"', *word, '"']
        assert len(t5) + 1 <= pipeline.tokenizer_2.model_max_length == 10
        assert len(clip) + 2 <= pipeline.tokenizer.model_max_length == 16


def test_ppocr_reads_what_the_pen_draws_unless_it_ran_dry(ocr: RewardScorer) -> None:
    world = spelt()
    layout = world.lay_out(world.codes[::18], torch.Generator().manual_seed(3))
    names = world.captions[::18]
    layout[:, -1] = 0  # full strength
    assert ocr.score(world.paint(layout), names).mean() >= 0.98
    assert ocr.score(world.paint(layout), names[1:] + names[:1]).mean() <= 0.4
    layout[:, -1] = 1
    assert ocr.score(world.paint(layout), names).mean() <= 0.1


def test_the_pen_knows_its_own_letters() -> None:
    source = PictureSource(torch.device("cpu"), 3, spelt())
    index = source.captions(24)
    names, pictures = [source.world.captions[i] for i in index], source.draw(index)
    assert check(pictures.numpy(), names).min() == 1
    assert check(pictures.numpy(), names[1:] + names[:1]).mean() <= 0.2


def test_some_of_what_the_base_model_writes_can_be_read(
    pipeline: FluxPipeline, ocr: RewardScorer
) -> None:
    asked = prompts("heldout")[::2]
    pictures = pipeline(
        asked,
        height=64,
        width=64,
        num_inference_steps=6,
        guidance_scale=3.5,
        max_sequence_length=10,
        generator=torch.Generator().manual_seed(0),
    ).images
    assert 0.15 <= ocr.score(as_pictures(pictures), asked).mean() <= 0.5


def test_the_recipe_is_ready_to_train(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", RECIPE, "--dry-run", f"run_dir={tmp_path / 'run'}"]) == 0
    assert "ocr (weight 1)" in capsys.readouterr().out
