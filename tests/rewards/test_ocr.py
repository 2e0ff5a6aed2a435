"""PP-OCR reads drawn pictures: fonts, sizes, turns, clutter, two lines, Chinese, nothing."""

import base64
import io
import logging
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards.contract import check_scorer
from g2rpo_ray.rewards.registry import check_files, make_scorer
from g2rpo_ray.rewards.scorer import MissingPackageError, RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers.pictures import as_pictures

FONTS = Path(matplotlib.get_data_path(), "fonts", "ttf")
CHINESE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAKQAAAArAQAAAADeKB7hAAABm0lEQVR42pWTMW4TQRSGv3le7E0ReehoyI4QB/ABEOwR"
    "OAJHoAxSJE/SpOUAFBxlQSm4BWs7BRWakSjWYrKPYnbttUKTV0zxz6//vff/M0Z5XFH4Xz0V9Y9hVa1UVdeqGlQ1aqUh"
    "KzwQmwMNkGg8JG83hw4OBNRBQw0tfJ3OMG+XHlbwce97QJap/yYm2Fmgy8T6MO9ngCvUQrqWEa3z0btBtyettziACwA6"
    "QP4ed1NSDWiPcNXRZtTSeYh/QAqu74uMnnEObH+D0ASGbee5t4JIu6Wc2nVnQUyAOlpgb6wRKEuPwGtWU+57PMKnF6eG"
    "uwUINbD0wEKrqoeNKU5y00lujn7id64CaC+murMdCIoCe3+afDbhl9qjEjJa5keXM1pw52GGkCbcH00JfDFp8oiEG24a"
    "+DCkMKL2px1cj4cLUePMwGhhP6bp3rrAJcB3YOEfXjpI77r1bUJVdaFV1NgyC0WqO96klYG+JIztgrbahEugqxSjcae7"
    "IGdscOUtmM4dJ5vziufPSFA2NIPdRoFUnGR0f26e8Av/AQJfoOT7Ns25AAAAAElFTkSuQmCC"
)
"""A line of Chinese in one bit a pixel; the machines of CI have no font for it."""


@pytest.fixture(scope="module")
def ocr() -> RewardScorer:
    pytest.importorskip("rapidocr", reason="needs g2rpo-ray[ocr], which [dev] has")
    return make_scorer("ocr", {}, "cpu")


def drawn(
    *lines: str, font: str = "DejaVuSans", height: int = 56, side: int = 512, turned: float = 0.0
) -> Image.Image:
    """Dark lines on a light ground, one below the other."""
    picture = Image.new("RGB", (side, side), (236, 228, 206))
    face = ImageFont.truetype(str(FONTS / f"{font}.ttf"), height)
    brush = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        place = (side // 2, side // 2 + round((number - (len(lines) - 1) / 2) * 1.5 * height))
        brush.text(place, line, font=face, fill=(30, 30, 90), anchor="mm")
    return picture.rotate(turned, Image.Resampling.BICUBIC, fillcolor=(236, 228, 206))


def cluttered(picture: Image.Image) -> Image.Image:
    """With discs, lines and noise around and behind the text."""
    random = np.random.default_rng(0)
    ground = Image.new("RGB", picture.size)
    brush = ImageDraw.Draw(ground)
    for _ in range(60):
        x, y, size = random.integers(0, picture.width, 3)
        colour = tuple(random.integers(120, 256, 3).tolist())
        brush.ellipse((x, y, x + size // 4, y + size // 4), fill=colour, outline="grey")
    text = np.asarray(picture).min(-1, keepdims=True) < 128
    noise = random.integers(-12, 12, (*text.shape[:2], 3))
    mixed = np.where(text, 15, np.asarray(ground) // 2 + 128) + noise
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def score(ocr: RewardScorer, picture: Image.Image, *texts: str) -> float:
    quoted = " and ".join(f'"{text}"' for text in texts)
    return float(ocr.score(as_pictures([picture]), [f"a poster with {quoted}"])[0])


@pytest.mark.parametrize(
    "font",
    ["DejaVuSans", "DejaVuSans-BoldOblique", "DejaVuSansMono", "DejaVuSerif-Italic", "STIXGeneral",
     "STIXGeneralBolIta"],
)  # fmt: skip
def test_fonts(ocr: RewardScorer, font: str) -> None:
    assert score(ocr, drawn("Fresh Bread", font=font), "Fresh Bread") == 1


@pytest.mark.parametrize(
    ("side", "height"), [(512, 14), (512, 150), (1024, 20), (1280, 300), (64, 20), (128, 24)]
)
def test_sizes_of_text_and_picture(ocr: RewardScorer, side: int, height: int) -> None:
    assert score(ocr, drawn("FOX", side=side, height=height), "fox") == 1


@pytest.mark.parametrize(
    ("turned", "least", "most"),
    [(-30, 1, 1), (-10, 1, 1), (10, 1, 1), (30, 1, 1), (90, 0.9, 1), (180, 0.5, 1)],
)
def test_turned_text(ocr: RewardScorer, turned: float, least: float, most: float) -> None:
    found = score(ocr, drawn("Fresh Bread", turned=turned), "Fresh Bread")
    assert least - 1e-6 <= found <= most


def test_clutter(ocr: RewardScorer) -> None:
    assert score(ocr, cluttered(drawn("Fresh Bread", height=64)), "Fresh Bread") == 1


def test_two_lines_are_one_text_or_two_in_any_order(ocr: RewardScorer) -> None:
    picture = drawn("Fresh Bread", "Daily")
    assert score(ocr, picture, "Fresh Bread Daily") == 1
    assert score(ocr, picture, "Daily", "Fresh Bread") == 1
    assert score(ocr, picture, "Daily", "Fresh Bread", "Open") == pytest.approx(15 / 19)


def test_chinese(ocr: RewardScorer) -> None:
    picture = Image.new("RGB", (360, 240), "white")
    picture.paste(Image.open(io.BytesIO(CHINESE)).convert("RGB"), (98, 98))
    assert score(ocr, picture, "欢迎光临") == 1
    assert score(ocr, picture, "欢迎再来") == 0.5


def test_wrong_letters_cost_their_share_and_nothing_written_is_0(ocr: RewardScorer) -> None:
    assert score(ocr, drawn("Fresh Braed"), "Fresh Bread") == pytest.approx(0.8)
    assert score(ocr, drawn("Fresh"), "Fresh Bread") == pytest.approx(0.5)
    assert score(ocr, drawn(), "Fresh Bread") == 0
    assert score(ocr, drawn("Umbrella"), "Fox") == 0


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, list[str]]:
    words = ["Fox", "Bread", "Open 24h", "", "Umbrella", "Bread"]
    prompts = [f'a sign with "{word or "Nothing"}"' for word in words]
    return as_pictures([drawn(word) for word in words]), prompts


def test_a_score_is_the_same_alone_in_a_batch_and_with_any_number_of_threads(
    ocr: RewardScorer, batch: tuple[Tensor, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures, prompts = batch
    together = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(ocr, "_threads", threads)
        together.append(ocr.score(pictures, prompts))
    alone = [ocr.score(pictures[i : i + 1], [prompts[i]]) for i in range(len(pictures))]
    assert all(torch.equal(scores, torch.cat(alone)) for scores in together)
    assert together[0].tolist() == [1, 1, 1, 0, 1, 1]


def test_a_scorer_answers_whatever_a_run_may_ask() -> None:
    pytest.importorskip("rapidocr")
    scorer = make_scorer("ocr", {"field": "text"}, "cpu")
    assert len(check_scorer(scorer, PromptText("a sign", {"text": "OPEN"}))) == 19


def test_a_prompt_without_text_has_no_score_and_the_others_have(
    ocr: RewardScorer, batch: tuple[Tensor, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    pictures, prompts = batch
    with caplog.at_level(logging.WARNING):
        scores = ocr.score(pictures[:3], [prompts[0], "a fox", prompts[2]])
    assert scores.isnan().tolist() == [False, True, False]
    assert scores[[0, 2]].tolist() == [1, 1]
    assert "'a fox': no text in double quotes" in caplog.text
    with pytest.raises(ScorerError, match="'a fox': no text in double quotes"):
        ocr.score(pictures[:2], ["a fox"] * 2)


def test_letters_that_the_model_lacks_are_named_and_other_signs_left_out(ocr: RewardScorer) -> None:
    with pytest.raises(ScorerError, match=r"has no 'веипрт'; .*recogniser"):
        score(ocr, drawn("x"), "Привет")
    assert score(ocr, drawn("Fresh Bread"), "Fresh Bread 🪿") == 1


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1), (3, 400)])
def test_a_strip_that_cannot_be_read_is_named(ocr: RewardScorer, size: tuple[int, int]) -> None:
    with pytest.raises(
        ScorerError, match=r"\d+x\d+ pixels cannot be read: one side is more than 60"
    ):
        ocr.score(torch.zeros(1, *size, 3, dtype=torch.uint8), ['"A"'])
    assert ocr.score(torch.zeros(1, 50, 3000, 3, dtype=torch.uint8), ['"A"']).item() == 0


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rapidocr")
    check_files("ocr", {})
    with pytest.raises(ScorerError, match=r"no\.onnx: no such file"):
        check_files("ocr", {"recogniser": str(tmp_path / "no.onnx")})
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(ScorerError, match=r"bad\.onnx: cannot be loaded as"):
        make_scorer("ocr", {"recogniser": str(tmp_path / "bad.onnx")}, "cpu")
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'g2rpo-ray\[ocr\]'"):
        check_files("ocr", {})


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rapidocr")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    scorer = make_scorer("ocr", {}, "cpu")
    assert score(scorer, drawn("Fox"), "Fox") == 1
