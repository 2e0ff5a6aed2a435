"""PickScore and the aesthetic score against plain code, and what they refuse to load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import ScorerError
from tests.rewards.small_models import aesthetic_options, pickscore_options
from tests.rewards.test_preprocess import photo_like

PROMPTS = ["a red circle", "a green triangle left of a blue square"] * 2


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    return torch.stack([photo_like(120, 90, seed) for seed in range(4)])


def test_pickscore_is_the_cosine_that_transformers_gives(pictures: Tensor, tmp_path: Path) -> None:
    scores = make_scorer("pickscore", pickscore_options(tmp_path), "cpu").score(pictures, PROMPTS)
    model: Any = CLIPModel.from_pretrained(tmp_path).eval()
    images = [Image.fromarray(picture.numpy()) for picture in pictures]
    processor: Any = CLIPImageProcessor.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=12,
                      return_tensors="pt")  # fmt: skip
    with torch.inference_mode():
        output = model(**texts, **processor(images=images, return_tensors="pt"))
        expected = output.logits_per_image.diagonal() / model.logit_scale.exp()
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-3)


def test_the_head_is_applied_to_normalised_features(pictures: Tensor, tmp_path: Path) -> None:
    scorer: Any = make_scorer("aesthetic", aesthetic_options(tmp_path), "cpu")
    state = torch.load(tmp_path / "head.pth", weights_only=True)
    features = scorer._features.image(pictures)
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(4))
    hidden = features @ state["layers.0.weight"].T + state["layers.0.bias"]
    expected = (hidden @ state["layers.2.weight"].T + state["layers.2.bias"])[:, 0]
    torch.testing.assert_close(scorer.score(pictures, PROMPTS), expected)


def test_a_linear_head_has_no_numbers_in_its_names(pictures: Tensor, tmp_path: Path) -> None:
    options = aesthetic_options(tmp_path)
    torch.save({"weight": torch.ones(1, 64), "bias": torch.ones(1)}, tmp_path / "head.pth")
    scorer: Any = make_scorer("aesthetic", options, "cpu")
    expected = scorer._features.image(pictures).sum(dim=-1) + 1
    torch.testing.assert_close(scorer.score(pictures, PROMPTS), expected)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"weight": torch.ones(1, 64)}, "layer 0 is no linear layer"),
        ({"weight": torch.ones(2, 64), "bias": torch.ones(2)}, "gives 2 numbers; expected 1"),
        ({"0.weight": torch.ones(8, 64), "0.bias": torch.ones(8), "2.weight": torch.ones(1, 9),
          "2.bias": torch.ones(1)}, "layer 2 has weight [1, 9]"),
        ({"weight": torch.ones(1, 64).to(torch.float8_e4m3fn), "bias": torch.ones(1)},
         "weight holds torch.float8_e4m3fn numbers"),
        ({"0.running_mean": torch.ones(8)}, "unexpected tensor '0.running_mean'"),
    ],
)  # fmt: skip
def test_a_head_of_another_kind_is_refused(
    state: dict[str, Tensor], cause: str, tmp_path: Path
) -> None:
    options = aesthetic_options(tmp_path)
    torch.save(state, tmp_path / "head.pth")
    with pytest.raises(ScorerError) as caught:
        make_scorer("aesthetic", options, "cpu")
    assert str(tmp_path / "head.pth") in str(caught.value)
    assert cause in str(caught.value)


def test_a_head_of_another_clip_is_named(pictures: Tensor, tmp_path: Path) -> None:
    scorer = make_scorer("aesthetic", aesthetic_options(tmp_path, (768, 1)), "cpu")
    with pytest.raises(ScorerError, match="takes 768 features, CLIP gives 64"):
        scorer.score(pictures, PROMPTS)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors"])
def test_a_pickscore_folder_that_lacks_a_file_is_named(name: str, tmp_path: Path) -> None:
    options = pickscore_options(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ScorerError) as caught:
        make_scorer("pickscore", options, "cpu")
    assert str(tmp_path) in str(caught.value)
    assert name in str(caught.value) or "no file named" in str(caught.value)


def test_pickscore_weights_that_are_missing_or_left_over_are_listed(tmp_path: Path) -> None:
    options = pickscore_options(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["another.weight"] = state.pop("visual_projection.weight")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ScorerError) as caught:
        make_scorer("pickscore", options, "cpu")
    assert "1 missing: visual_projection.weight" in str(caught.value)
    assert "1 unexpected: another.weight" in str(caught.value)


@pytest.mark.parametrize("pickled", [False, True])
def test_quantised_weights_of_pickscore_are_refused(tmp_path: Path, pickled: bool) -> None:
    options = pickscore_options(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file) | {"position_ids": torch.arange(2)}
    name = "visual_projection.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    if pickled:
        file.unlink()
        file = tmp_path / "pytorch_model.bin"
        torch.save(state, file)
    else:
        save_file(state, file, {"format": "pt"})
    with pytest.raises(ScorerError) as caught:
        make_scorer("pickscore", options, "cpu")
    assert f"{file}: {name} holds " in str(caught.value)


def test_a_quantised_pickscore_folder_is_refused(tmp_path: Path) -> None:
    options = pickscore_options(tmp_path)
    file = tmp_path / "config.json"
    change = {"quantization_config": {"quant_method": "gptq"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ScorerError, match="quantization_config names the quantiser 'gptq'"):
        make_scorer("pickscore", options, "cpu")


@pytest.mark.parametrize("change", [{"resample": 2}, {"crop_size": 16}, {"size": {"height": 32}}])
def test_another_preprocessing_is_refused_and_not_guessed(
    change: dict[str, Any], tmp_path: Path
) -> None:
    options = pickscore_options(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ScorerError, match=r"preprocessor_config\.json"):
        make_scorer("pickscore", options, "cpu")
