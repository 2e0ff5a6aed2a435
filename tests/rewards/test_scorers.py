"""Scorers without Ray: they rank what they see, and refuse files that they should not load."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import load_config
from g2rpo_ray.rewards.registry import SCORERS, make_scorer, parse_options
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict
from g2rpo_ray.rewards.scorers.clip_features import ClipFeatures
from g2rpo_ray.tiny_world.scene import all_scenes, draw
from tests.tiny import QUICKSTART

HPS_FILE = "tiny_world:hps/HPS_tiny.pt"
HPS_FOLDER = "local-dir:tiny_world:hps"


@pytest.fixture(scope="module")
def options() -> dict[str, dict[str, Any]]:
    return {reward.kind: reward.options for reward in load_config(QUICKSTART).rewards.values()}


@pytest.fixture(scope="module")
def scorers(options: dict[str, dict[str, Any]]) -> dict[str, RewardScorer]:
    return {kind: make_scorer(kind, options[kind], "cpu") for kind in ("hps", "clip", "oracle")}


@pytest.fixture(scope="module")
def drawn() -> tuple[Tensor, list[str]]:
    """48 true pictures and their captions."""
    scenes = all_scenes()[5::40]
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.from_numpy(draw(scene, generator)) for scene in scenes]
    return torch.stack(pictures), [scene.caption for scene in scenes]


def hps_error(**options: str) -> str:
    with pytest.raises(ScorerError) as caught:
        make_scorer("hps", {"checkpoint": HPS_FILE, "architecture": HPS_FOLDER} | options, "cpu")
    return str(caught.value)


@pytest.mark.parametrize(("kind", "share"), [("hps", 0.95), ("clip", 0.95), ("oracle", 0.97)])
def test_the_right_caption_scores_above_a_wrong_one(
    scorers: dict[str, RewardScorer], drawn: tuple[Tensor, list[str]], kind: str, share: float
) -> None:
    pictures, captions = drawn
    right = scorers[kind].score(pictures, captions)
    wrong = scorers[kind].score(pictures, captions[7:] + captions[:7])
    assert right.dtype == torch.float32
    assert right.shape == (len(captions),)
    assert float((right > wrong).float().mean()) >= share


@pytest.mark.parametrize("kind", ["hps", "clip", "oracle"])
def test_a_score_does_not_depend_on_what_is_scored_beside_it(
    scorers: dict[str, RewardScorer], drawn: tuple[Tensor, list[str]], kind: str
) -> None:
    pictures, captions = drawn
    together = scorers[kind].score(pictures[:4], captions[:4])
    alone = torch.cat([scorers[kind].score(pictures[i : i + 1], [captions[i]]) for i in range(4)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_loading_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    make_scorer("clip", {"architecture": "local-dir:tiny_world:clip"}, "cpu")
    assert caplog.records == []


def test_the_text_tower_runs_once_for_a_prompt() -> None:
    encoded: list[str] = []

    def encode_text(prompt: str) -> Tensor:
        encoded.append(prompt)
        return torch.ones(3)

    def encode_image(images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))

    features = ClipFeatures(
        encode_image, encode_text, lambda images: images, torch.device("cpu"), torch.float32
    )
    pictures = torch.ones(3, 4, 4, 3, dtype=torch.uint8)
    features.similarity(pictures, ["a cat", "a dog", "a cat"])
    scores = features.similarity(pictures, ["a dog", "a cat", "a cat"])
    assert encoded == ["a cat", "a dog"]
    assert torch.allclose(scores, torch.ones(3))


@pytest.mark.parametrize("kind", sorted(SCORERS))
def test_unknown_options_are_refused(kind: str) -> None:
    with pytest.raises(ValidationError, match="volume"):
        parse_options(kind, {"volume": 11})


def test_unknown_scorer_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no scorer 'hsp'; known are .*clip, .*hps, .*oracle"):
        parse_options("hsp", {})


class _Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_checkpoint_with_code_is_refused_and_not_run(tmp_path: Path, form: str) -> None:
    checkpoint, sprung = tmp_path / "HPS.pt", tmp_path / "sprung"
    content = {"state_dict": {"weight": _Trap(sprung)}}
    if form == "torch":
        torch.save(content, checkpoint)
    else:
        checkpoint.write_bytes(pickle.dumps(content))
    message = hps_error(checkpoint=str(checkpoint))
    assert f"{checkpoint}: not a file of plain tensors" in message
    assert not sprung.exists()


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(2), {"state_dict": [1]}, {"epoch": 3}])
def test_a_checkpoint_without_a_state_is_refused(tmp_path: Path, content: object) -> None:
    checkpoint = tmp_path / "HPS.pt"
    torch.save(content, checkpoint)
    assert f"{checkpoint}: expected tensors by name" in hps_error(checkpoint=str(checkpoint))


@pytest.mark.parametrize("name", ["HPS.pt", "HPS.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip file"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    checkpoint = tmp_path / name
    checkpoint.write_bytes(content)
    assert f"{checkpoint}: " in hps_error(checkpoint=str(checkpoint))


def test_a_checkpoint_cut_short_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "HPS.pt"
    checkpoint.write_bytes(resolve_path(HPS_FILE).read_bytes()[:100_000])
    assert f"{checkpoint}: " in hps_error(checkpoint=str(checkpoint))


def test_a_missing_checkpoint_is_named() -> None:
    assert "/no/HPS.pt: no such checkpoint file" in hps_error(checkpoint="/no/HPS.pt")


def test_missing_left_over_and_misshapen_weights_are_listed(tmp_path: Path) -> None:
    state = load_state_dict(resolve_path(HPS_FILE))
    missing, misshapen = "visual.proj", "ln_final.weight"
    del state[missing]
    state["another.weight"] = torch.zeros(1)
    state[misshapen] = state[misshapen][:-1]
    checkpoint = tmp_path / "HPS.pt"
    torch.save({"state_dict": state}, checkpoint)
    message = hps_error(checkpoint=str(checkpoint))
    assert f"{checkpoint}: does not fit the architecture" in message
    assert all(name in message for name in (missing, misshapen, "another.weight"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    state = load_state_dict(resolve_path(HPS_FILE))
    state["visual.proj"] = state["visual.proj"].to(dtype)
    checkpoint = tmp_path / f"HPS.{suffix}"
    if suffix == "pt":
        torch.save(state, checkpoint)
    else:
        save_file({name: tensor.clone() for name, tensor in state.items()}, checkpoint)
    message = hps_error(checkpoint=str(checkpoint))
    assert f"{checkpoint}: visual.proj holds {dtype} numbers" in message


def test_a_folder_without_its_configuration_is_not_guessed(tmp_path: Path) -> None:
    message = hps_error(architecture=f"local-dir:{tmp_path}")
    assert f"{tmp_path}: no open_clip_config.json" in message


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_clip_folder_without_sound_weights_is_named(tmp_path: Path, damage: str) -> None:
    folder = Path(shutil.copytree(resolve_path("tiny_world:clip"), tmp_path / "clip"))
    weights = folder / "open_clip_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage == "cut short":
        weights.write_bytes(content[:100_000])
    with pytest.raises(ScorerError) as caught:
        make_scorer("clip", {"architecture": f"local-dir:{folder}"}, "cpu")
    assert str(folder) in str(caught.value)


def test_an_architecture_by_name_needs_a_checkpoint() -> None:
    with pytest.raises(ScorerError) as caught:
        make_scorer("clip", {"architecture": "ViT-B-32"}, "cpu")
    assert "'ViT-B-32'" in str(caught.value)
    assert "'checkpoint' must name a file" in str(caught.value)


def test_an_unknown_architecture_is_named() -> None:
    assert "open_clip knows no model 'ViT-Z-99'" in hps_error(architecture="ViT-Z-99")


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("tests.rewards.fakes:Missing", "cannot be imported"),
        ("no.such.module:Scorer", "cannot be imported"),
        ("tests.rewards.fakes:NoScorer", "no subclass of g2rpo_ray.rewards.scorer.RewardScorer"),
        ("tests.rewards.fakes:HANG_S", "no subclass of"),
    ],
)
def test_a_python_scorer_that_cannot_be_used_is_named(target: str, cause: str) -> None:
    with pytest.raises(ScorerError) as caught:
        make_scorer("python", {"target": target}, "cpu")
    assert repr(target) in str(caught.value)
    assert cause in str(caught.value)


def test_a_python_scorer_checks_its_own_options() -> None:
    options = {"target": "tests.rewards.fakes:ObedientScorer", "options": {"logg": "x"}}
    with pytest.raises(ScorerError) as caught:
        make_scorer("python", options, "cpu")
    assert "tests.rewards.fakes:ObedientScorer" in str(caught.value)
    assert "logg" in str(caught.value)
