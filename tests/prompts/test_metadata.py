"""What a prompt file says beside the text goes with the prompt, wherever it goes."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from g2rpo_ray.common.prompt_text import PromptText, category_of, metadata_of
from g2rpo_ray.prompts.reading import MANIFEST, PROMPTS_FILE, read_prompts
from g2rpo_ray.training import embed as embed_module

GENEVAL = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a bench"},
    {
        "tag": "counting",
        "include": [{"class": "clock", "count": 2}],
        "exclude": [{"class": "clock", "count": 3}],
        "prompt": "two clocks",
    },
]
LINES = "\n".join(map(json.dumps, GENEVAL))
PARTI = (
    "Prompt\tCategory\tChallenge\tNote\n"
    "a bench\tArtifacts\tBasic\t\n"
    'the word "START" on a bench\tArtifacts\tWriting & Symbols\tof a "sign"\n'
)
DRAWBENCH = 'Prompts,Category\n"A red car, parked.",Colors\nTwo dogs,Counting\n'
IN_STYLE = [{"style": "anime"}, {"style": "anime"}, {"style": "photo"}]
STYLES = {"anime": ["a bench", "a fox"], "photo": ["two clocks"]}
COLUMNS = {"prompt": ["a bench", "two clocks"], "text": ["HI", "HO"], "version": 2}


@pytest.mark.parametrize(
    ("name", "content", "key", "expected"),
    [
        ("geneval.jsonl", LINES, "prompt", GENEVAL),
        ("geneval.json", json.dumps(GENEVAL), "prompt", GENEVAL),
        (
            "parti.tsv",
            PARTI,
            "prompt",
            [
                {"Category": "Artifacts", "Challenge": "Basic"},
                {"Category": "Artifacts", "Challenge": "Writing & Symbols", "Note": 'of a "sign"'},
            ],
        ),
        ("drawbench.csv", DRAWBENCH, "prompts", [{"Category": "Colors"}, {"Category": "Counting"}]),
        ("hpdv2.json", json.dumps(STYLES), "prompt", IN_STYLE),
        ("columns.json", json.dumps(COLUMNS), "prompt", [{"text": "HI"}, {"text": "HO"}]),
        ("ocr.txt", 'a sign that says "HI"\n', "prompt", [{}]),
    ],
)
def test_every_form_of_a_prompt_set(
    tmp_path: Path, name: str, content: str, key: str, expected: list[dict[str, Any]]
) -> None:
    (tmp_path / name).write_text(content)
    found = [dict(metadata_of(prompt)) for prompt in read_prompts(tmp_path / name, None, key)]
    assert found == [{k: v for k, v in one.items() if k != "prompt"} for one in expected]


def test_parquet_and_arrow_without_their_pictures(tmp_path: Path) -> None:
    image = pa.array([{"bytes": b"\x89PNG", "path": "1.png"}])
    words = pa.array(["HI"]).dictionary_encode()
    table = pa.table(
        {"image": image, "prompt": ["a sign"], "words": words, "places": [[1, 2]], "raw": [b"x"]}
    )
    pq.write_table(table, tmp_path / "p.parquet")
    with pa.OSFile(str(tmp_path / "p"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as ipc:
        ipc.write_table(table)
    for name in ("p.parquet", "p"):
        (prompt,) = read_prompts(tmp_path / name, None)
        assert prompt == "a sign"
        assert metadata_of(prompt) == {"words": "HI", "places": [1, 2]}


def test_they_are_embedded_with_their_prompt(tmp_path: Path) -> None:
    texts = [PromptText("a", {"tag": "字"}), "b"]
    embed_module._write_prompts(tmp_path, [texts], [{"checksums": ["x", "y"]}])
    (tmp_path / MANIFEST).touch()
    assert [dict(metadata_of(p)) for p in read_prompts(tmp_path, None)] == [{"tag": "字"}, {}]
    table = pq.read_table(tmp_path / PROMPTS_FILE).drop_columns("metadata")
    pq.write_table(table, tmp_path / PROMPTS_FILE)
    assert read_prompts(tmp_path, None) == texts, "a folder of an earlier version"


def test_a_prompt_is_its_text_to_everything_else() -> None:
    prompt = PromptText("a fox", {"Tag": "animals"})
    assert prompt == "a fox"
    assert "a fox" in {prompt}
    assert json.dumps([prompt]) == '["a fox"]'
    assert pa.array([prompt]).to_pylist() == ["a fox"]
    assert type(str(prompt)) is str
    for other in (pickle.loads(pickle.dumps(prompt)), copy.deepcopy(prompt)):
        assert (other, metadata_of(other)) == ("a fox", {"Tag": "animals"})
    assert metadata_of("a fox") == {}


@pytest.mark.parametrize(
    ("metadata", "category"),
    [
        ({"tag": "counting"}, "counting"),
        ({"Category": "Artifacts", "style": "photo"}, "Artifacts"),
        ({"category": 3, "style": "photo"}, "photo"),
        ({"category": ""}, None),
        ({}, None),
    ],
)
def test_the_category(metadata: dict[str, Any], category: str | None) -> None:
    assert category_of(PromptText("a fox", metadata)) == category
