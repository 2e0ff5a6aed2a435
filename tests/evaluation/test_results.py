"""Records, table and gallery, from scores that are known beforehand."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from g2rpo_ray.evaluation.gallery import write_gallery
from g2rpo_ray.evaluation.records import Records, check_folder
from g2rpo_ray.evaluation.rows import EvaluationError, Row, Weights
from g2rpo_ray.evaluation.table import (
    DIVERSITY,
    category_part,
    column_names,
    make_table,
    markdown,
    table_parts,
    write_table_parquet,
)
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.rollout.answers import HeldoutPictures

BASE = Row(Weights("base", None, "none"), 10)
TRAINED = Row(Weights("mine", Path("/checkpoint"), "g2rpo: hps"), 10)
HYBRID = Row(TRAINED.weights, 10, 0.6)
ROWS = [BASE, TRAINED, HYBRID]
REQUEST = {"rows": {"base-10steps": None, "mine-10steps": "abc"}, "prompts": {"0": "a cat"}}
EVIL = '</script><script>alert(1)</script> "quoted" & <b>قطة</b>'
PROMPTS = {3: "a cat", 7: EVIL, 9: "a dog"}


def result(number: int, hps: list[float], diversity: float = 0.1) -> HeldoutPictures:
    pictures = torch.full((len(hps), 16, 32, 3), number * 10, dtype=torch.uint8)
    scores = {
        "hps": torch.tensor(hps),
        "oracle": torch.zeros(len(hps)),
        DIVERSITY: torch.full((len(hps),), diversity),
    }
    return HeldoutPictures(number, PROMPTS[number], pictures, scores, evaluations=0)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    records = Records(tmp_path / "out", REQUEST)
    records.add(BASE.name, [result(3, [0.1, 0.3]), result(7, [0.4, 0.4]), result(9, [0.5, 0.7])])
    records.add(TRAINED.name, [result(3, [0.5, 0.5]), result(7, [0.2, 0.4], 0.0)])
    records.add(TRAINED.name, [result(9, [0.6, 0.8])])
    records.add(HYBRID.name, [result(3, [0.4, 0.4]), result(7, [math.nan, 0.4])])
    return records


def parts(records: Records) -> str:
    table = make_table(ROWS, records, ["hps", "oracle"], with_diversity=True)
    return markdown(table_parts(table, ["hps", "oracle"], ["hps"], "32 x 16 pictures"))


def test_the_table_compares_prompt_by_prompt(records: Records) -> None:
    base, trained, hybrid = make_table(ROWS, records, ["hps", "oracle"], with_diversity=True)
    assert base.rewards["hps"].mean == pytest.approx(0.4)
    assert base.differences == {}
    assert trained.rewards["hps"].mean == pytest.approx(0.5)
    assert trained.differences["hps"].difference.mean == pytest.approx(0.1)
    assert trained.differences["hps"].worse_share == pytest.approx(1 / 3)
    assert trained.diversity is not None
    assert trained.diversity.mean == pytest.approx(0.2 / 3)
    # One of prompt 7's pictures has no score: the prompt has none, and is not counted.
    assert hybrid.prompts == 2
    assert hybrid.rewards["hps"].prompts == 1
    assert hybrid.rewards["hps"].mean == pytest.approx(0.4)


def test_the_scores_by_category(records: Records) -> None:
    categories = {3: "cats", 7: "cats", 9: "dogs"}
    part = category_part(ROWS, records, ["hps"], ["hps"], categories)
    assert part.head == ["category", "model", "steps", "prompts", "hps¹"]
    rows = [[*row[:4], row[4][:6]] for row in part.cells]
    assert rows == [
        ["cats", "base", "10", "2", "0.3000"],
        ["cats", "mine", "10", "2", "0.4000"],
        ["dogs", "base", "10", "1", "0.6000"],
        ["dogs", "mine", "10", "1", "0.7000"],
    ]
    assert category_part(ROWS, records, ["hps"], [], {}).cells == []


def test_a_folder_from_before_there_were_metadata_goes_on(tmp_path: Path) -> None:
    Records(tmp_path / "out", REQUEST)
    metadata = {"metadata": {"0": {"tag": "cats"}}}
    Records(tmp_path / "out", REQUEST | metadata)
    with pytest.raises(EvaluationError, match="with other metadata"):
        Records(tmp_path / "out", REQUEST | {"metadata": {}})


def test_markdown_keeps_hybrid_inference_apart_and_marks_what_was_trained_on(
    records: Records,
) -> None:
    text = parts(records)
    before, after = text.split("## Hybrid inference\n")
    assert "| base | none | 10 | 3 | 0.4000 [" in before
    assert "| mine | g2rpo: hps | 10 | 3 | 0.5000 [" in before
    assert "Δ hps¹" in before
    assert "oracle¹" not in text
    assert "6 + 4 base" not in before
    # Fewer prompts than the row's stand beside the number.
    assert "| mine | g2rpo: hps | 6 + 4 base | 2 | 0.4000 (n=1) |" in after


def test_parquet_files_hold_every_picture_and_every_cell(records: Records) -> None:
    path = records.write_parquet(ROWS, ["hps", "oracle", DIVERSITY], {3: "cats", 9: "dogs"})
    pictures = pq.read_table(path).to_pylist()
    assert len(pictures) == 16
    first = pictures[0]
    assert (first["row"], first["prompt_id"], first["picture"]) == ("base-10steps", 3, 0)
    assert first["hps"] == pytest.approx(0.1)
    assert [line["category"] for line in pictures[:5:2]] == ["cats", None, "dogs"]
    missing = [line for line in pictures if line["hps"] is None]
    assert [(line["row"], line["prompt_id"]) for line in missing] == [(HYBRID.name, 7)]
    assert all((records.folder / line["file"]).is_file() for line in pictures)
    table = make_table(ROWS, records, ["hps"], with_diversity=True)
    write_table_parquet(table, records.folder / "table.parquet")
    cells = pq.read_table(records.folder / "table.parquet").to_pylist()
    assert [(c["row"], c["score"]) for c in cells[:3]] == [
        ("base-10steps", "hps"),
        ("base-10steps", DIVERSITY),
        ("mine-10steps", "hps"),
    ]
    assert cells[0]["difference"] is None
    assert cells[2]["difference"] == pytest.approx(0.1)


class Page(HTMLParser):
    """Tags and texts of the gallery."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.scripts = 0
        self.cards: list[dict] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "img":
            self.images.append(attributes["src"] or "")
        self.scripts += tag == "script"
        if attributes.get("class") == "card":
            self.cards.append(json.loads(attributes["data-scores"] or ""))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_gallery_shows_every_picture_and_prompts_as_text(records: Records) -> None:
    table = make_table(ROWS, records, ["hps"], with_diversity=False)
    shown = table_parts(table, ["hps"], ["hps"], "32 x 16 pictures")
    path = records.folder / "gallery.html"
    write_gallery(path, shown, ROWS, records, ["hps"])
    page = Page(path.read_text())
    assert len(page.images) == 16
    assert all((records.folder / file).is_file() for file in page.images)
    # A prompt is text, whatever it holds; the one script is the page's own.
    assert page.scripts == 1
    assert EVIL in page.texts
    assert [card["id"] for card in page.cards] == [3, 7, 9]
    assert page.cards[0]["scores"]["10"]["mine"]["hps"] == pytest.approx(0.5)
    assert page.cards[1]["scores"]["10"]["mine (hybrid 0.6)"]["hps"] is None
    assert page.cards[0]["base"]["10"]["hps"] == pytest.approx(0.2)
    # Prompts 3 and 9 became better than the base model's, prompt 7 worse.
    assert re.findall(r'class="(up|down)">([\d.]+)', path.read_text()) == [
        ("up", "0.5000"), ("up", "0.4000"), ("down", "0.3000"), ("up", "0.7000"),
    ]  # fmt: skip


def test_a_folder_goes_on_where_it_was_killed(records: Records) -> None:
    log = records.folder / "scores.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    # Killed while the third line was written, with one picture of the second lost.
    log.write_text("".join(lines[:2]) + lines[2][:20])
    (records.folder / "pictures" / BASE.name / "7_1.png").unlink()
    again = Records(records.folder, REQUEST)
    assert list(again.of_row(BASE.name)) == [3]
    again.add(BASE.name, [result(9, [0.5, 0.7])])
    assert sorted(Records(records.folder, REQUEST).of_row(BASE.name)) == [3, 9]


def test_a_folder_killed_inside_a_character_goes_on(records: Records) -> None:
    log = records.folder / "scores.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    arabic = lines[1].index("ق".encode())
    log.write_bytes(lines[0] + lines[1][: arabic + 1])
    again = Records(records.folder, REQUEST)
    assert list(again.of_row(BASE.name)) == [3]
    assert log.read_bytes() == lines[0]


def test_a_damaged_character_is_named(records: Records) -> None:
    log = records.folder / "scores.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[1].replace("ق".encode(), b"\xd9") + lines[2])
    with pytest.raises(EvaluationError, match=r"scores\.jsonl, line 2: not readable"):
        Records(records.folder, REQUEST)


def test_what_lacks_a_score_is_drawn_again_when_the_folder_is_opened_again(
    records: Records,
) -> None:
    # Prompt 7 lacks one; while the folder is open it was tried once, and that is all.
    assert records.has(HYBRID.name, 7)
    again = Records(records.folder, REQUEST)
    assert not again.has(HYBRID.name, 7)
    assert again.has(HYBRID.name, 3)
    again.add(HYBRID.name, [result(7, [0.2, 0.4])])
    third = Records(records.folder, REQUEST)
    assert third.of_row(HYBRID.name)[7].scores["hps"] == pytest.approx([0.2, 0.4])


def test_a_damaged_line_is_named(records: Records) -> None:
    log = records.folder / "scores.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(lines[0] + '{"row": 1}\n' + lines[2])
    with pytest.raises(EvaluationError, match=r"scores\.jsonl, line 2: not readable"):
        Records(records.folder, REQUEST)


def test_rows_may_be_added_but_not_changed(records: Records) -> None:
    more = REQUEST | {"rows": {"other-10steps": "def"}}
    Records(records.folder, more)
    changed = REQUEST | {"rows": {"mine-10steps": "changed weights"}}
    with pytest.raises(EvaluationError, match=r"other mine-10steps; name another folder"):
        Records(records.folder, changed)
    with pytest.raises(EvaluationError, match="with other prompts; name another folder"):
        Records(records.folder, REQUEST | {"prompts": {"0": "a dog"}})


def test_what_was_asked_then_and_is_not_now_is_another_evaluation(tmp_path: Path) -> None:
    Records(tmp_path, REQUEST | {"negative_prompt": "blurry"})
    with pytest.raises(EvaluationError, match="with other negative_prompt; name another folder"):
        Records(tmp_path, REQUEST)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(EvaluationError, match="not empty and no evaluation"):
        check_folder(tmp_path)
    (tmp_path / "request.json").write_text("{")
    with pytest.raises(EvaluationError, match=r"request\.json: not readable"):
        Records(tmp_path, REQUEST)


def test_columns_stand_in_the_papers_order() -> None:
    kinds = ["oracle", "unified_reward", "clip", "pickscore", "hps", "image_reward"]
    rewards = {f"r{i}": RewardSection.model_construct(kind=kind) for i, kind in enumerate(kinds)}
    rewards[DIVERSITY] = RewardSection.model_construct(kind=DIVERSITY)
    assert [rewards[name].kind for name in column_names(rewards)] == [
        "hps", "clip", "pickscore", "image_reward", "unified_reward", "oracle",
    ]  # fmt: skip


def test_means_of_a_prompt_need_all_its_pictures(records: Records) -> None:
    means = records.prompt_means(HYBRID.name, "hps", [3, 7])
    assert means[0] == pytest.approx(0.4)
    assert np.isnan(means[1])
