"""scripts/bench_attention.py: on the CPU, with a stand-in for FlashAttention-3's package."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from g2rpo_ray.models.families import FAMILIES
from tests.flash3 import flash3_package  # noqa: F401
from tests.scripts.loading import SCRIPTS, load_script


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("bench_attention")


def run(bench: ModuleType, file: Path, *options: str) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench", "--json", str(file), "--tiny", *options])
        bench.main()
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


@pytest.mark.usefixtures("flash3_package")
def test_every_backend_has_a_row_with_times_and_errors_or_why_not(
    bench: ModuleType, tmp_path: Path
) -> None:
    rows = run(bench, tmp_path / "found.json")
    alone = {row["backend"]: row for row in rows if row["how"] == "alone"}
    assert "No viable backend" in alone["cudnn"]["failed"]
    for name in ("flash", "flash3"):
        assert alone[name]["ms"] > 0
        assert 0 < alone[name]["error"] < 0.004, "bfloat16 has 8 bits"
    float8 = alone["flash3 float8, rounding included"]
    assert 0.01 < float8["error"] < 0.06, "float8 has 4 bits"
    assert alone[bench.FLOAT8_ALONE]["ms"] > 0
    compiled = {row["backend"]: row for row in rows if row["how"] == "compiled"}
    assert list(compiled) == list(bench.BACKENDS)
    assert compiled["flash"]["compiled as eager"]
    assert compiled["flash3"]["compiled as eager"]
    assert "failed" in compiled["cudnn"]


def test_a_package_that_is_missing_and_a_time_that_is_over_are_told(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    parts = bench.measured(*bench.BACKENDS["flash3"], bench.TINY[0], bench.torch.device("cpu"))
    with pytest.raises(ImportError, match="fa3_fwd_interface"):
        next(parts)
    rows = run(bench, tmp_path / "found.json", "--limit-s", "0")
    assert {row["failed"] for row in rows} == {
        "TimeoutError: not measured: no time was left (--limit-s)"
    }


def test_shapes_are_those_of_the_published_networks(bench: ModuleType) -> None:
    published = {}
    for family in FAMILIES:
        for name, entry in family.published.items():
            sizes = entry.configs["transformer"]
            heads = sizes.get("num_attention_heads") or sizes["n_heads"]
            published[name] = heads, sizes.get("attention_head_dim") or sizes["dim"] // heads
    assert {s: (s.heads, s.head_dim) for s in bench.SHAPES} == {
        s: published[s.model] for s in bench.SHAPES
    }
