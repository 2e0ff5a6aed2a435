"""The composition scorer on a small random OWLv2 in the real file layout, and on planted boxes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Owlv2ForObjectDetection, Owlv2ImageProcessor, Owlv2Processor

from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards.contract import check_scorer
from g2rpo_ray.rewards.registry import check_files, make_scorer
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.scorers.owlv2 import QUERY
from tests.rewards.small_models import composition_options
from tests.rewards.test_preprocess import photo_like

COUNTING = {
    "tag": "counting",
    "include": [{"class": "circle", "count": 3}],
    "exclude": [{"class": "circle", "count": 4}],
}
EVERYTHING = {
    "include": [
        {"class": "circle", "count": 2, "color": "red"},
        {"class": "square", "count": 1, "color": "blue", "position": ["left of", 0]},
    ]
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return composition_options(tmp_path_factory.mktemp("owlv2"))


@pytest.fixture(scope="module")
def scorer(options: dict[str, Any]) -> Any:
    return make_scorer("composition", options, "cpu")


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    return torch.stack([photo_like(120, 90, seed) for seed in range(4)])


@pytest.mark.parametrize("metadata", [COUNTING, EVERYTHING])
@pytest.mark.parametrize("strict", [False, True])
def test_a_scorer_answers_whatever_a_run_may_ask(
    options: dict[str, Any], metadata: dict[str, Any], strict: bool
) -> None:
    scorer = make_scorer("composition", options | {"strict": strict}, "cpu")
    passed = check_scorer(scorer, PromptText("a photo", metadata))
    assert passed[3] == "judged by metadata: a text without them has no score"
    assert len(passed) == 19


def test_boxes_are_those_that_transformers_finds(
    scorer: Any, options: dict[str, Any], pictures: Tensor
) -> None:
    names = ["circle", "square", "triangle"]
    (found, *_) = scorer._detector.detect(pictures[:1], [names], [0.5], 1.0)
    folder = options["detector"]
    processor: Any = Owlv2Processor(
        Owlv2ImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    )
    model: Any = Owlv2ForObjectDetection.from_pretrained(folder).eval()
    texts = [[QUERY.format(name) for name in names]]
    images = [Image.fromarray(pictures[0].numpy())]
    inputs = processor(text=texts, images=images, max_length=16, return_tensors="pt")
    with torch.inference_mode():
        output = model(**inputs)
    (expected,) = processor.post_process_grounded_object_detection(
        output, threshold=0.5, target_sizes=[(120, 90)]
    )
    limit = torch.tensor([90.0, 120.0, 90.0, 120.0])
    compared = 0
    for place, name in enumerate(names):
        here = expected["labels"] == place
        order = expected["scores"][here].argsort(descending=True, stable=True)
        # Cut off at the picture's edge, beyond which transformers' boxes may lie.
        boxes = torch.minimum(expected["boxes"][here][order].clamp(min=0), limit)
        boxes = boxes[(boxes[:, 2:] > boxes[:, :2]).all(-1)][:16]
        torch.testing.assert_close(
            torch.tensor(found[name]).reshape(-1, 4), boxes, atol=1e-3, rtol=0
        )
        compared += len(boxes)
    assert compared > 5


def test_overlapping_boxes_of_a_class_are_one_object(scorer: Any, pictures: Tensor) -> None:
    def count(max_overlap: float) -> int:
        (found,) = scorer._detector.detect(pictures[:1], [["circle"]], [0.0], max_overlap)
        return len(found["circle"])

    assert 1 <= count(0.0) < count(0.5) <= count(1.0) == 16


SHAPES = {"circle": (8, 60, 40, 92), "square": (70, 10, 110, 50), "triangle": (70, 70, 110, 110)}
FILLS = {"circle": (220, 30, 30), "square": (30, 60, 220), "triangle": (30, 160, 60)}


@pytest.fixture
def planted(scorer: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A red circle, a blue square and a green triangle, which a made-up detector finds."""
    picture = torch.full((120, 120, 3), 240, dtype=torch.uint8)
    for name, (left, top, right, bottom) in SHAPES.items():
        picture[top:bottom, left:right] = torch.tensor(FILLS[name], dtype=torch.uint8)

    def detect(_: Tensor, classes: list[list[str]], *__: object) -> list[Any]:
        return [{name: [SHAPES[name]] if name in SHAPES else [] for name in names}
                for names in classes]  # fmt: skip

    monkeypatch.setattr(scorer._detector, "detect", detect)
    return picture


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ([{"class": "circle", "count": 1, "color": "red"}], 1),
        ([{"class": "square", "count": 1, "color": "blue"}], 1),
        ([{"class": "square", "count": 1, "color": "red"}], 0.5),
        ([{"class": "circle", "count": 1, "color": "red"},
          {"class": "triangle", "count": 1, "color": "green"}], 1),
        ([{"class": "circle", "count": 1, "color": "green"},
          {"class": "triangle", "count": 1, "color": "green"}], 0.75),
        ([{"class": "square", "count": 1},
          {"class": "circle", "count": 1, "position": ["left of", 0]}], 1),
        ([{"class": "square", "count": 1},
          {"class": "circle", "count": 1, "position": ["above", 0]}], 2 / 3),
        ([{"class": "dog", "count": 1}], 0),
        ([{"class": "circle", "count": 2, "color": "red"}], 0.5),
    ],
)  # fmt: skip
def test_colours_and_places_of_what_was_found(
    scorer: Any, planted: Tensor, include: list[dict[str, Any]], expected: float
) -> None:
    prompt = PromptText("a photo", {"include": include})
    assert scorer.score(planted[None], [prompt]).item() == pytest.approx(expected)


def test_each_prompt_of_a_batch_gets_its_own_colours(scorer: Any, planted: Tensor) -> None:
    wanted = [("circle", "blue"), ("dog", "red"), ("square", "blue"), ("circle", "red")]
    prompts = [
        PromptText("a photo", {"include": [{"class": name, "count": 1, "color": colour}]})
        for name, colour in wanted
    ]
    assert scorer.score(planted.expand(4, -1, -1, -1), prompts).tolist() == [0.5, 0, 1, 1]


def test_a_score_does_not_depend_on_what_is_scored_beside_it(scorer: Any, pictures: Tensor) -> None:
    prompts = [PromptText("x", m) for m in (COUNTING, EVERYTHING, COUNTING, EVERYTHING)]
    together = scorer.score(pictures, prompts)
    alone = [scorer.score(pictures[i : i + 1], [prompts[i]]) for i in range(4)]
    assert torch.equal(together, torch.cat(alone))


def test_a_prompt_without_metadata_has_no_score_and_the_others_have(
    scorer: Any, planted: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    good = PromptText("x", {"include": [{"class": "circle", "count": 1}]})
    with caplog.at_level(logging.WARNING):
        scores = scorer.score(planted.expand(3, -1, -1, -1), [good, "two cats", good])
    assert scores[[0, 2]].tolist() == [1, 1]
    assert scores[1].isnan()
    assert "prompt 'two cats': its metadata are not as GenEval's" in caplog.text
    with pytest.raises(ScorerError, match="'two cats'"):
        scorer.score(planted[None], ["two cats"])


def test_a_class_that_the_detector_cannot_read_is_named(scorer: Any, pictures: Tensor) -> None:
    prompt = PromptText("x", {"include": [{"class": "circle " * 20, "count": 1}]})
    with pytest.raises(ScorerError, match=r"does not know the class 'circle circle .* 16 are read"):
        scorer.score(pictures[:1], [prompt])


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("preprocessor_config.json", None, "no preprocessor_config.json in it"),
        ("tokenizer.json", None, "tokenizer"),
        ("config.json", {"model_type": "clip"}, "model_type is not 'owlv2'"),
    ],
)
def test_a_folder_that_is_no_owlv2_is_named_before_a_run(
    options: dict[str, Any], tmp_path: Path, name: str, content: object, cause: str
) -> None:
    for file in Path(options["detector"]).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ScorerError, match=cause):
        check_files("composition", options | {"detector": str(tmp_path)})
