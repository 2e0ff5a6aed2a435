"""ImageReward's checkpoint on transformers' BLIP against the package's own code."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import BertTokenizer

from g2rpo_ray.rewards.contract import check_scorer
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.scorers.pictures import as_pictures
from tests.rewards.old_packages import environment
from tests.rewards.test_preprocess import photo_like

PACKAGES = (
    "image-reward==1.5", "timm==0.6.13", "transformers==4.27.4", "tokenizers==0.13.3",
    "huggingface-hub==0.17.3",
)  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, *"a red fox dog in the snow ##s two , . left of".split()]  # noqa: SIM905
PROMPTS = ["a red fox in the snow", "two dogs, left of a fox.", "fox " * 60]
SIZES = [(224, 224), (400, 300), (300, 400), (150, 160)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint, settings, tokenizer, pictures, and the package's scores of them."""
    folder = tmp_path_factory.mktemp("image-reward")
    python = environment(folder / "environment", PACKAGES)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    med = {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "vocab_size": len(WORDS) + 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "layer_norm_eps": 1e-12,
        "hidden_act": "gelu", "add_cross_attention": True, "model_type": "bert",
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2,
        "pad_token_id": 0, "initializer_range": 0.02,
    }  # fmt: skip
    (folder / "med_config.json").write_text(json.dumps(med))
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    for number, (width, height) in enumerate(SIZES):
        Image.fromarray(photo_like(height, width, number).numpy()).save(folder / f"{number}.png")
    script = Path(__file__).with_name("image_reward_original.py")
    result = subprocess.run(
        [str(python), "-I", str(script), str(folder)],
        capture_output=True, text=True, timeout=480, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    return folder


def options(folder: Path) -> dict[str, Any]:
    return {
        "checkpoint": str(folder / "ImageReward.pt"),
        "med_config": str(folder / "med_config.json"),
        "tokenizer": str(folder / "tokenizer"),
    }


@pytest.mark.slow
def test_scores_are_those_of_the_package(folder: Path) -> None:
    scorer = make_scorer("image_reward", options(folder), "cpu")
    expected = torch.tensor(json.loads((folder / "scores.json").read_text()))
    assert float(expected.std(dim=0).min()) > 0.01, "the pictures score alike"
    assert float(expected.std(dim=1).min()) > 0.01, "the prompts score alike"
    for row, file in zip(expected, sorted(folder.glob("*.png")), strict=True):
        pictures = as_pictures([Image.open(file)] * len(PROMPTS))
        torch.testing.assert_close(scorer.score(pictures, PROMPTS), row, rtol=0, atol=2e-3)


@pytest.mark.slow
def test_it_answers_whatever_a_run_may_ask(folder: Path) -> None:
    check_scorer(make_scorer("image_reward", options(folder), "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("blip.visual_encoder.pos_embed", "expected ImageReward's tensors"),
        ("blip.visual_encoder.blocks.1.norm1.bias", "1 missing: vision.encoder.layers.1."),
        ("mlp.layers.7.bias", "1 missing: head.7.bias"),
    ],
)
def test_a_checkpoint_that_lacks_a_tensor_is_named(
    folder: Path, tmp_path: Path, name: str, cause: str
) -> None:
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    del state[name]
    torch.save(state, tmp_path / "ImageReward.pt")
    settings = options(folder) | {"checkpoint": str(tmp_path / "ImageReward.pt")}
    with pytest.raises(ScorerError) as caught:
        make_scorer("image_reward", settings, "cpu")
    assert str(tmp_path / "ImageReward.pt") in str(caught.value)
    assert cause in str(caught.value)
