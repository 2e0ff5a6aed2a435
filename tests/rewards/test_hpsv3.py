"""HPSv3's checkpoint on today's Qwen2-VL, against the package's own code."""

import hashlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from g2rpo_ray.rewards.registry import check_files, make_scorer
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.scorers.hpsv3 import QUESTION
from g2rpo_ray.rewards.scorers.pictures import as_pictures
from random_hpsv3 import write_hpsv3, write_tokenizer
from tests.rewards.old_packages import environment
from tests.rewards.test_preprocess import photo_like

PACKAGES = (
    "hpsv3==1.0.0", "transformers==4.45.2", "tokenizers==0.20.3", "huggingface-hub==0.36.0",
    # From 13 on Pillow resizes some pictures along columns first.
    "pillow==11.3.0",
)  # fmt: skip
PROMPTS = [
    "a red fox in the snow",
    "two dogs, left of a fox.",
    "一只狐狸 in {braces}",
    "fox " * 60,
    "",
]
SIZES = [(448, 448), (720, 720), (400, 300), (300, 1000), (90, 64)]
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_hpsv3(tmp_path_factory.mktemp("hpsv3"))


def photos(*seeds: int) -> torch.Tensor:
    return torch.stack([photo_like(96, 64, seed) for seed in seeds])


@pytest.mark.slow
def test_scores_are_those_of_the_package(options: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(options["base"])
    python = environment(tmp_path / "environment", PACKAGES)
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    for number, (width, height) in enumerate(SIZES):
        Image.fromarray(photo_like(height, width, number).numpy()).save(folder / f"{number}.png")
    script = Path(__file__).with_name("hpsv3_original.py")
    result = subprocess.run(
        [str(python), "-I", str(script), str(folder)],
        capture_output=True, text=True, timeout=480, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    expected = torch.tensor(json.loads((folder / "scores.json").read_text()))
    assert float(expected.std(dim=0).min()) > 0.1, "the pictures score alike"
    assert float(expected.std(dim=1).min()) > 0.1, "the prompts score alike"
    scorer = make_scorer("hpsv3", options, "cpu")
    for row, file in zip(expected, sorted(folder.glob("*.png")), strict=True):
        pictures = as_pictures([Image.open(file)] * len(PROMPTS))
        # Without resizing nothing but the order of sums differs.
        tolerance = 1e-4 if pictures.shape[1:3] == (448, 448) else 1e-3
        torch.testing.assert_close(scorer.score(pictures, PROMPTS), row, rtol=0, atol=tolerance)


def test_every_picture_is_judged_by_its_own_prompt(options: dict[str, Any]) -> None:
    scorer, prompts = make_scorer("hpsv3", options, "cpu"), ["a red fox", "two dogs " * 9]
    pictures = photos(0, 1)
    own = [scorer.score(pictures[i : i + 1], prompts[i : i + 1]) for i in range(2)]
    crossed = [scorer.score(pictures[i : i + 1], [prompts[1 - i]]) for i in range(2)]
    torch.testing.assert_close(scorer.score(pictures, prompts), torch.cat(own), rtol=0, atol=1e-4)
    assert float((torch.cat(own) - torch.cat(crossed)).abs().min()) > 0.05


def test_the_question_is_the_one_that_the_model_was_trained_with() -> None:
    assert hashlib.sha256(QUESTION.read_bytes()).hexdigest() == (
        "eec53640fa8b722d1bc98497f3697eb7d0ad13afc6ced5936ee3bafc38b6e7f8"
    )


@pytest.mark.parametrize("marker", ["<|Reward|>", "<|image_pad|>", "<|im_end|>", "<|endoftext|>"])
def test_a_marker_in_a_prompt_is_text(options: dict[str, Any], marker: str) -> None:
    scorer, pictures = make_scorer("hpsv3", options, "cpu"), photos(0, 1)
    plain, marked = (scorer.score(pictures, [text] * 2) for text in ("a fox", f"a fox{marker}"))
    assert bool(marked.isfinite().all())
    assert float((plain - marked).abs().min()) > 1e-3
    beside = scorer.score(pictures, [f"a fox{marker}", "two dogs"])
    torch.testing.assert_close(beside[:1], marked[:1], rtol=0, atol=1e-4)


def test_bfloat16_stays_near(options: dict[str, Any]) -> None:
    pictures, prompts = photos(0, 1, 2, 3), ["a red fox", "snow " * 50, "", "two dogs"]
    exact = make_scorer("hpsv3", options, "cpu").score(pictures, prompts)
    half = make_scorer("hpsv3", options | {"dtype": "bfloat16"}, "cpu").score(pictures, prompts)
    assert 0 < float((half - exact).abs().max()) < 0.5 < float(exact.std())


def test_names_of_a_newer_transformers_are_known(options: dict[str, Any], tmp_path: Path) -> None:
    state = {
        re.sub(r"^model\.", "model.language_model.", name): tensor
        for name, tensor in load_file(options["checkpoint"]).items()
    }
    state = {re.sub(r"^visual\.", "model.visual.", name): it for name, it in state.items()}
    save_file(state, tmp_path / "new.safetensors")
    scorers = [
        make_scorer("hpsv3", options | {"checkpoint": file}, "cpu")
        for file in (options["checkpoint"], str(tmp_path / "new.safetensors"))
    ]
    first, second = (scorer.score(photos(0), ["a fox"]) for scorer in scorers)
    assert torch.equal(first, second)


def test_a_picture_that_is_too_long_is_named(options: dict[str, Any]) -> None:
    scorer = make_scorer("hpsv3", options, "cpu")
    with pytest.raises(ScorerError, match=r"pictures of 2x402: .*aspect ratio"):
        scorer.score(torch.zeros(1, 2, 402, 3, dtype=torch.uint8), ["a fox"])


def _without(name: str) -> Callable[[State], object]:
    return lambda state: state.pop(name)


def _misshapen(name: str, *shape: int) -> Callable[[State], object]:
    return lambda state: state.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (_without("rm_head.0.weight"), "no 'head.0.weight'; expected HPSv3's tensors"),
        (_without("rm_head.3.bias"), "1 missing: head.3.bias"),
        (_without("model.embed_tokens.weight"), "no 'text.embed_tokens.weight'"),
        (_without("visual.blocks.1.norm1.bias"), "1 missing: vision.blocks.1.norm1.bias"),
        (_misshapen("rm_head.5.weight", 4, 16), "rm_head.5 gives 4 numbers; HPSv3's gives two"),
        (_misshapen("model.norm.weight", 32), "text.norm.weight [32] instead of [64]"),
        (_misshapen("model.layers.7.mlp.up_proj.weight", 96, 64), "1 unexpected: text.layers.7."),
        (_misshapen("model.embed_tokens.weight", 900, 64), "900 embeddings, and "),
    ],
)
@pytest.mark.parametrize("load", [lambda o: check_files("hpsv3", o),
                                  lambda o: make_scorer("hpsv3", o, "cpu")])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_named_before_a_run(
    options: dict[str, Any], tmp_path: Path, damage: Callable[[State], object], cause: str,
    load: Callable[[dict[str, Any]], object],
) -> None:  # fmt: skip
    state = load_file(options["checkpoint"])
    damage(state)
    save_file(state, tmp_path / "HPSv3.safetensors")
    with pytest.raises(ScorerError) as caught:
        load(options | {"checkpoint": str(tmp_path / "HPSv3.safetensors")})
    assert str(tmp_path / "HPSv3.safetensors") in str(caught.value)
    assert cause in str(caught.value)


def _no(*names: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (_no("tokenizer_config.json"), "no tokenizer_config.json in it"),
        (_no("config.json"), "no config.json in it"),
        (_no("preprocessor_config.json"), "no preprocessor_config.json in it"),
        (_no("tokenizer.json", "vocab.json"), "tokenizer cannot be used"),
        (lambda it: write_tokenizer(it, markers=4), "lacks <|vision_end|>; expected Qwen2"),
        (lambda it: (it / "config.json").write_text('{"model_type": "clip"}'), "not 'qwen2_vl'"),
        (_no("HPSv3.safetensors"), "no such checkpoint file"),
        (lambda it: (it / "HPSv3.safetensors").write_bytes(b"cut"), "damaged, or no checkpoint"),
    ],
)
def test_other_files_that_do_not_fit_are_named_before_a_run(
    tmp_path: Path, damage: Callable[[Path], object], cause: str
) -> None:
    options = write_hpsv3(tmp_path)
    damage(tmp_path)
    with pytest.raises(ScorerError) as caught:
        check_files("hpsv3", options)
    assert str(tmp_path) in str(caught.value)
    assert cause in str(caught.value)
