"""Our HPS score against the hpsv2 package's own, from the same checkpoint file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from g2rpo_ray.common.device import compute_the_same_bits
from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers import hpsv2
from g2rpo_ray.rewards.scorers.isolated import HPSV2_PACKAGES, make_hpsv2_environment
from g2rpo_ray.rewards.scorers.pictures import as_pictures

ARCHITECTURE = {
    "embed_dim": 64,
    "vision_cfg": {
        "image_size": 64, "patch_size": 8, "width": 96, "layers": 2, "head_width": 32
    },
    "text_cfg": {
        "context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2
    },
}  # fmt: skip
PROMPT = "A photo of a red fox, 4k; naïve café"


def picture(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    generator = np.random.default_rng(3)
    coarse = Image.fromarray(generator.integers(0, 256, (7, 7, 4), dtype=np.uint8), "RGBA")
    image = coarse.resize(size, Image.Resampling.BICUBIC).convert(mode)
    assert image.mode == mode
    return image


PICTURES = {
    "square": picture((200, 200)),
    "portrait": picture((150, 400)),
    "landscape": picture((400, 300)),
    "smaller": picture((40, 30)),
    "grey-scale": picture((200, 120), "L"),
    "RGBA": picture((120, 200), "RGBA"),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment."""
    reachable = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d"]
    folder = tmp_path_factory.mktemp("hpsv2")
    probe = subprocess.run(
        [*reachable, str(folder), HPSV2_PACKAGES[0]],
        capture_output=True, text=True, check=False, timeout=480,
    )  # fmt: skip
    if probe.returncode != 0:
        pytest.skip(f"no package registry that has {HPSV2_PACKAGES[0]}: {probe.stderr[-200:]}")
    return make_hpsv2_environment(folder / "environment")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small checkpoint in HPS's format, and its architecture for both packages."""
    folder = tmp_path_factory.mktemp("small-hps")
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    preprocess = {"mean": list(mean), "std": list(std)}
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": ARCHITECTURE, "preprocess_cfg": preprocess})
    )
    (folder / "small-hps.json").write_text(json.dumps(ARCHITECTURE))
    torch.manual_seed(0)
    model: Any = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    for parameter in model.parameters():
        # As initialised, a small tower hardly looks at the picture.
        parameter.data += 0.05 * torch.randn_like(parameter)
    torch.save({"epoch": 1, "state_dict": model.state_dict()}, folder / "HPS_small.pt")
    return {
        "checkpoint": folder / "HPS_small.pt",
        "folder": folder,
        "config": folder / "small-hps.json",
    }


@pytest.fixture(scope="module")
def scorers(environment: Path, files: dict[str, Path]) -> dict[str, RewardScorer]:
    checkpoint = str(files["checkpoint"])
    ours = {"checkpoint": checkpoint, "architecture": f"local-dir:{files['folder']}"}
    theirs = {
        "checkpoint": checkpoint,
        "python": str(environment),
        "architecture": "small-hps",
        "architecture_config": str(files["config"]),
        "timeout_s": 300.0,
    }
    return {"hps": make_scorer("hps", ours, "cpu"), "hpsv2": make_scorer("hpsv2", theirs, "cpu")}


@pytest.mark.slow
@pytest.mark.parametrize("form", PICTURES)
def test_hps_gives_the_score_of_the_hpsv2_package(
    scorers: dict[str, RewardScorer], form: str
) -> None:
    pictures = as_pictures([PICTURES[form]])
    ours = scorers["hps"].score(pictures, [PROMPT])
    theirs = scorers["hpsv2"].score(pictures, [PROMPT])
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_package_tells_pictures_and_prompts_apart(scorers: dict[str, RewardScorer]) -> None:
    pictures = as_pictures([PICTURES["square"], PICTURES["square"].rotate(90)])
    prompts = [PROMPT, "two dogs"]
    together = scorers["hpsv2"].score(pictures, prompts)
    assert float((together[0] - together[1]).abs()) > 1e-3
    torch.testing.assert_close(scorers["hps"].score(pictures, prompts), together, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_is_the_packages_own_error(
    environment: Path, files: dict[str, Path]
) -> None:
    options = {"checkpoint": str(files["checkpoint"]), "python": str(environment)}
    scorer = make_scorer("hpsv2", options | {"architecture": "ViT-B-32"}, "cpu")
    with pytest.raises(ScorerError, match=r"hpsv2_child: RuntimeError: .*loading state_dict"):
        scorer.score(as_pictures([PICTURES["square"]]), [PROMPT])


def test_without_its_python_the_command_that_makes_it_is_named(files: dict[str, Path]) -> None:
    options = {"checkpoint": str(files["checkpoint"]), "python": "/no/bin/python"}
    with pytest.raises(ScorerError, match=r"/no/bin/python: no such Python; .*scorers\.isolated"):
        make_scorer("hpsv2", options, "cpu")


def test_a_python_without_the_package_is_an_error_that_names_it(files: dict[str, Path]) -> None:
    options = {"checkpoint": str(files["checkpoint"]), "python": sys.executable}
    with pytest.raises(ScorerError, match="No module named 'hpsv2'"):
        make_scorer("hpsv2", options, "cpu")


def test_the_child_needs_no_class_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "strange_child.py"
    child.write_text(
        "import sys\n"
        "from multiprocessing.connection import Connection\n"
        "sys.modules['g2rpo_ray'] = None\n"
        "pipe = Connection(int(sys.argv[2]))\n"
        "pipe.send_bytes(b'{\"ready\": true}')\n"
        "pipe.recv()\n"
        "pipe.send_bytes(b'{\"scores\": [1.0]}')\n"
    )
    monkeypatch.setattr(hpsv2, "CHILD", child)
    (tmp_path / "weights.pt").touch()
    options = {"python": sys.executable, "checkpoint": str(tmp_path / "weights.pt")}
    prompt = PromptText("a fox", {"tag": "one"})
    scores = make_scorer("hpsv2", options, "cpu").score(torch.zeros(1, 2, 2, 3), [prompt])
    assert scores.tolist() == [1.0]


def test_a_child_that_does_not_read_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "deaf_child.py"
    child.write_text(
        "import sys, time\n"
        "from multiprocessing.connection import Connection\n"
        "pipe = Connection(int(sys.argv[2]))\n"
        "pipe.send_bytes(b'{\"ready\": true}')\n"
        "time.sleep(3600)\n"
    )
    monkeypatch.setattr(hpsv2, "CHILD", child)
    (tmp_path / "weights.pt").touch()
    options = {
        "python": sys.executable, "checkpoint": str(tmp_path / "weights.pt"), "timeout_s": 4.0
    }  # fmt: skip
    scorer = make_scorer("hpsv2", options, "cpu")
    larger_than_the_pipe = torch.zeros(2, 1024, 1024, 3, dtype=torch.uint8)
    with pytest.raises(ScorerError, match="gave no answer within 4 s"):
        scorer.score(larger_than_the_pipe, ["a", "b"])


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("asked", [False, True])
def test_the_child_computes_the_same_bits_where_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Run as it is, with a stand-in for the package that scores what the child was told."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, sys, torch\n"
        "from unittest.mock import MagicMock\n"
        "package = MagicMock()\n"
        "package.src.open_clip.create_model_and_transforms.return_value = 3 * [None]\n"
        "package.img_score.score = lambda *_, **__: [\n"
        "    torch.backends.cudnn.deterministic and 'CUBLAS_WORKSPACE_CONFIG' in os.environ\n"
        "]\n"
        "sys.modules |= {'hpsv2': package, 'hpsv2.src': package.src}\n"
        f"exec(compile(open({str(hpsv2.CHILD)!r}).read(), 'child', 'exec'))\n"
    )
    monkeypatch.setattr(hpsv2, "CHILD", child)
    (tmp_path / "weights.pt").touch()
    options = {"python": sys.executable, "checkpoint": str(tmp_path / "weights.pt")}
    if asked:
        compute_the_same_bits()
    pictures = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    assert make_scorer("hpsv2", options, "cpu").score(pictures, ["a fox"]).tolist() == [asked]
