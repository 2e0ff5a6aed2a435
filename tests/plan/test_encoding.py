"""Encoding in a plan and in a dry run: how long, and a warning where it is what a run waits for."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from g2rpo_ray.cli import main
from g2rpo_ray.common.files import sha256_of_file
from g2rpo_ray.config import load_config
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.plan.costs import CostTable, load_costs
from g2rpo_ray.plan.encoding import Encoding, plan_encoding, text_parameters
from g2rpo_ray.prompts.embeddings import Manifest, write_manifest
from tests.models.families.folders import family_config
from tests.tiny import QUICKSTART

ONE_GPU = QUICKSTART.parent / "flux_g2rpo_hps_one_gpu_lora.yaml"


def one_gpu(*overrides: str) -> Encoding:
    found = plan_encoding(load_config(ONE_GPU, overrides), load_costs(), "H100")
    assert found is not None
    return found


def test_t5_xxl_takes_a_minute_on_one_thread() -> None:
    # Measured: 75 s a prompt in float32 on a machine with AVX2.
    alone = one_gpu("prompts.encoder_threads=1")
    assert 50 < alone.prompt_s < 75
    assert alone.heldout_s == 100 * alone.prompt_s
    assert alone.training_s == 4 * alone.prompt_s
    assert one_gpu("prompts.encoder_threads=8").prompt_s == alone.prompt_s / 8
    assert one_gpu("prompts.encoder_gpus=0.1").prompt_s < 0.1


@pytest.mark.parametrize("family", ["flux1_dev", "sd3", "qwen_image", "z_image", "flux2_dev"])
def test_a_folders_own_text_encoders_are_counted(family: str) -> None:
    model = family_config(family).model
    pipeline = TextEncoder(model, 8)._pipeline
    names = [part for part in pipeline.components if part.startswith("text_encoder")]
    networks = [network for name in names if (network := getattr(pipeline, name)) is not None]
    whole = sum(p.numel() for network in networks for p in network.parameters())
    counted = text_parameters(model)
    assert counted is not None
    assert 0 < counted < whole


def test_what_was_embedded_before_takes_nothing(tmp_path: Path) -> None:
    embedded = tmp_path / "embedded"
    embedded.mkdir()
    table = embedded / "prompts.parquet"
    columns = {"text": ["a"], "shard": [0], "row": [0], "checksum": [""]}
    pq.write_table(pa.table(columns), table)
    write_manifest(embedded, Manifest({}, "", 1, 0, "", {}, [], sha256_of_file(table)))
    found = one_gpu(f"prompts.heldout={embedded}")
    assert (found.training, found.heldout) == (4, 0)
    found = one_gpu(f"prompts.train={embedded}", f"prompts.heldout={embedded}")
    assert found.warning(0.0) is None
    assert str(found) == "none: all prompts were embedded before"


def test_a_warning_says_who_waits() -> None:
    encoding = Encoding(4, 100, 10.0, "a CPU")
    assert encoding.warning(1000.0) is None
    some = encoding.warning(999.0)
    assert some is not None
    assert "the first evaluation waits 16 min 40 s" in some
    assert "every iteration" not in some
    both = encoding.warning(39.0)
    assert both is not None
    assert "every iteration waits 40 s for its prompts, and the first evaluation waits" in both


def test_plan_and_dry_run_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["prompts.encoder_threads=1"]
    written = tmp_path / "plan.json"
    assert main(["plan", str(ONE_GPU), "--gpus", "1", "--json", str(written), *slow]) == 0
    assert "encoding takes longer than an iteration" in capsys.readouterr().out
    encoding = json.loads(written.read_text())["encoding"]
    assert (encoding["training"], encoding["heldout"]) == (4, 100)
    run_dir = f"run_dir={tmp_path / 'run'}"
    assert main(["train", str(ONE_GPU), "--dry-run", run_dir, *slow]) == 0
    printed = capsys.readouterr().out
    assert "encoding  4 prompts an iteration" in printed
    assert "warning  encoding takes longer than an iteration" in printed
    assert main(["train", str(QUICKSTART), "--dry-run", run_dir]) == 0
    printed = capsys.readouterr().out
    # Embeddings of the tiny world's prompts lie beside their files.
    assert "encoding  none: all prompts were embedded before" in printed
    assert "warning" not in printed


def test_a_dry_run_that_cannot_be_predicted_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g2rpo_ray.plan.plan.load_costs", lambda: CostTable(cards={}))
    assert main(["train", str(ONE_GPU), f"run_dir={tmp_path / 'run'}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "encoding  not predicted: " in printed
    assert "resolved configuration" in printed
