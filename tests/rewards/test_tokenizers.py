"""Scorers whose tokenizer lost its vocabulary: one score for every prompt, unless refused."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from g2rpo_ray.cli import main
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.doctor.checks.models import model_problems
from g2rpo_ray.models.catalogue import check_rewards
from g2rpo_ray.rewards.registry import check_files, make_scorer
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.training.session import open_session
from tests.rewards.small_models import composition_options, pickscore_options
from tests.tiny import QUICKSTART, tiny_config


def clip_options(folder: Path) -> dict[str, Any]:
    shutil.copytree(resolve_path("tiny_world:clip"), folder)
    return {"architecture": f"local-dir:{folder}"}


def hps_options(folder: Path) -> dict[str, Any]:
    shutil.copytree(resolve_path("tiny_world:hps"), folder)
    return {"architecture": f"local-dir:{folder}", "checkpoint": str(folder / "HPS_tiny.pt")}


def image_reward_options(folder: Path) -> dict[str, Any]:
    """BERT's tokenizer and the sizes; the checkpoint, without a tensor, is loaded after both."""
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "cat", "sky", "fog"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (folder / "med_config.json").write_text(json.dumps({"vocab_size": len(words)}))
    torch.save({}, folder / "ImageReward.pt")
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
    torch.save({}, tmp_path / "weights.pt")
    options = {"architecture": "ViT-B-32", "checkpoint": str(tmp_path / "weights.pt")}
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


def test_a_file_that_is_no_checkpoint_is_named_before_a_run(tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0:root:/root:/bin/bash\n")
    clip, pickscore = clip_options(tmp_path / "clip"), pickscore_options(tmp_path / "pickscore")
    composition = composition_options(tmp_path / "composition")
    given: list[tuple[str, dict[str, Any], str]] = [
        ("hps", hps_options(tmp_path / "hps"), "checkpoint"),
        ("clip", clip, "checkpoint"),
        ("aesthetic", clip, "checkpoint"),
        ("aesthetic", clip, "head"),
        ("image_reward", image_reward_options(tmp_path / "image_reward"), "checkpoint"),
        ("hpsv2", {"python": sys.executable}, "checkpoint"),
        ("composition", composition, "clip_checkpoint"),
    ]
    for kind, options, key in given:
        if kind == "aesthetic":
            options = {"head": str(passwd)} | options
        with pytest.raises(ScorerError, match=f"{passwd}: (damaged, or )?no"):
            check_files(kind, options | {key: str(passwd)})
    for kind, options, folder in (
        ("pickscore", pickscore, tmp_path / "pickscore"),
        ("composition", composition, tmp_path / "composition"),
    ):
        check_files(kind, options)
        (folder / "model.safetensors").write_bytes(passwd.read_bytes())
        with pytest.raises(ScorerError, match=r"model\.safetensors"):
            check_files(kind, options)


def test_a_dry_run_and_the_doctor_look_at_the_files_of_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0:root:/root:/bin/bash\n")

    def dry_run(path: Path) -> tuple[int, str]:
        settings = [f"run_dir={tmp_path}/run", f"rewards.hps.options.checkpoint={path}"]
        code = main(["train", str(QUICKSTART), "--dry-run", *settings])
        return code, "".join(capsys.readouterr())

    assert dry_run(tmp_path / "none")[0] == 0
    told = f"rewards.hps.options.checkpoint: {tmp_path}/none is not there"
    assert f"{told} (yet)" in dry_run(tmp_path / "none")[1]
    absent = tiny_config(tmp_path, f"rewards.hps.options.checkpoint={tmp_path}/none")
    with open_session(absent, "none"):
        assert f"warning: {told}; it must be where that reward's" in capsys.readouterr().out
    assert dry_run(passwd)[0] == 2
    assert f"g2rpo: rewards.hps: {passwd}: damaged, or no checkpoint" in dry_run(passwd)[1]
    config = tiny_config(tmp_path, f"rewards.hps.options.checkpoint={passwd}")
    assert any(f"rewards.hps: {passwd}: damaged" in found for found in model_problems(config))
