"""Scorers whose tokenizer lost its vocabulary: one score for every prompt, unless refused."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import pytest

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.models.catalogue import check_rewards
from g2rpo_ray.rewards.registry import check_files, make_scorer
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.training.session import open_session
from tests.rewards.small_models import pickscore_options
from tests.tiny import tiny_config


def clip_options(folder: Path) -> dict[str, Any]:
    shutil.copytree(resolve_path("tiny_world:clip"), folder)
    return {"architecture": f"local-dir:{folder}"}


def hps_options(folder: Path) -> dict[str, Any]:
    shutil.copytree(resolve_path("tiny_world:hps"), folder)
    return {"architecture": f"local-dir:{folder}", "checkpoint": str(folder / "HPS_tiny.pt")}


def image_reward_options(folder: Path) -> dict[str, Any]:
    """BERT's tokenizer and the sizes; the checkpoint is read after both."""
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "cat", "sky", "fog"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (folder / "med_config.json").write_text(json.dumps({"vocab_size": len(words)}))
    paths = {"med_config": str(folder / "med_config.json"), "tokenizer": str(folder)}
    return paths | {"checkpoint": str(folder / "ImageReward.pt")}


KINDS: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "clip": (clip_options, "tokenizer.json"),
    "hps": (hps_options, "tokenizer.json"),
    "pickscore": (pickscore_options, "tokenizer.json"),
    "image_reward": (image_reward_options, "vocab.txt"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_is_missing(kind: str, tmp_path: Path) -> None:
    make, vocabulary = KINDS[kind]
    options, folder = make(tmp_path / "folder"), tmp_path / "folder"
    check_files(kind, options)
    (folder / vocabulary).unlink()
    for look in (check_files, partial(make_scorer, device="cpu")):
        with pytest.raises(ScorerError, match=f"{folder}: the vocabulary is missing"):
            look(kind, options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_of_a_larger_model(kind: str, tmp_path: Path) -> None:
    make, _ = KINDS[kind]
    options, folder = make(tmp_path / "folder"), tmp_path / "folder"
    names = {"pickscore": "config.json", "image_reward": "med_config.json"}
    file = folder / names.get(kind, "open_clip_config.json")
    file.write_text(file.read_text().replace('"vocab_size": ', '"vocab_size": 9'))
    with pytest.raises(ScorerError, match=r"and the text encoder has 9\d+ embeddings"):
        check_files(kind, options)


def test_open_clips_own_vocabulary_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tmp_path / "bpe.txt.gz"
    cut.write_bytes(Path(open_clip.tokenizer.default_bpe()).read_bytes()[:100_000])
    own = open_clip.tokenizer.SimpleTokenizer
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda _: own(bpe_path=str(cut)))
    options = {"architecture": "ViT-B-32", "checkpoint": str(cut)}
    with pytest.raises(ScorerError, match="ViT-B-32: its tokenizer cannot be used: EOFError"):
        check_files("clip", options)


def test_a_run_ends_before_it_starts_anything(tmp_path: Path) -> None:
    options = clip_options(tmp_path / "clip")
    (tmp_path / "clip" / "tokenizer.json").unlink()
    setting = f"rewards.clip.options.architecture={options['architecture']}"
    config = tiny_config(tmp_path / "run", setting)
    with pytest.raises(ScorerError, match=r"rewards\.clip: .*: the vocabulary is missing"):  # noqa: SIM117
        with open_session(config, "none"):
            pass
    assert not (tmp_path / "run").exists()


def test_files_that_only_another_node_has_are_left_to_it(tmp_path: Path) -> None:
    check_rewards(tiny_config(tmp_path, "rewards.clip.options.architecture=local-dir:/no/clip"))
