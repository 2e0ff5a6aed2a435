"""Counted sizes and operations against published and separately measured ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from g2rpo_ray.config import load_config
from g2rpo_ray.models import families
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.plan.networks import learner_bytes, policy_size, scorer_size
from tests.tiny import QUICKSTART, copy_flux

PAPER = QUICKSTART.parent / "flux_g2rpo_hps.yaml"


def test_flux1_dev_at_the_papers_resolution() -> None:
    size = policy_size(load_config(PAPER))
    assert "published architecture" in size.source
    assert size.parameters == 11_901_408_320  # FLUX.1-dev's 11.9 B
    assert size.evaluation.tflop == pytest.approx(37.3, rel=0.03)
    assert size.evaluation.matrix == pytest.approx(32.7e12, rel=0.03)
    # 4 x tokens^2 x width for each block: two products of 2 x tokens^2 x width.
    assert size.evaluation.attention == 4 * 2537**2 * 3072 * 57


def test_operations_grow_with_resolution_and_text() -> None:
    base, large, short = (
        policy_size(load_config(PAPER, overrides)).evaluation
        for overrides in (
            [],
            ["sampling.height=1440", "sampling.width=1440"],
            ["prompts.max_sequence_length=256"],
        )
    )
    tokens = 90 * 90 + 512
    assert large.attention == base.attention / 2537**2 * tokens**2
    # Nearly in proportion: modulation is applied once a sample.
    assert large.matrix / base.matrix == pytest.approx(tokens / 2537, rel=0.02)
    assert short.matrix < base.matrix
    assert short.attention < base.attention


def test_lora_counts_its_adapters_only() -> None:
    size = policy_size(load_config(PAPER.with_name("flux_g2rpo_hps_lora.yaml")))
    # 19 double blocks: 8 projections of 3072 -> 3072 and 4 of 3072 <-> 12288; 38 single blocks:
    # 3 of 3072 -> 3072, one to 12288, one from 15360. A rank of 64 on both sides of each.
    double = 19 * (8 * (3072 + 3072) + 4 * (3072 + 12288))
    single = 38 * (3 * (3072 + 3072) + (3072 + 12288) + (15360 + 3072))
    assert size.trained_parameters == 64 * (double + single)
    assert size.frozen_parameters == size.parameters == 11_901_408_320
    # Each adapter computes for every token that its module sees; modulation has none.
    full = policy_size(load_config(PAPER))
    # A double block's modules see either the image or the text, half of them each.
    tokens = (2025 + 512) * (double / 2 + single)
    added = size.evaluation.tflop - full.evaluation.tflop
    assert added == pytest.approx(2 * 64 * tokens / 1e12, rel=1e-9)


def test_some_trained_modules_are_counted_as_the_loader_does() -> None:
    size = policy_size(load_config(PAPER, ["model.trained_modules=[transformer_blocks.0]"]))

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    # Two streams: modulation, query, key, value and output, their norms, feed-forward.
    stream = linear(3072, 6 * 3072) + 4 * linear(3072, 3072) + 2 * 128
    stream += linear(3072, 12288) + linear(12288, 3072)
    assert size.trained_parameters == 2 * stream
    assert size.trained_parameters + size.frozen_parameters == size.parameters == 11_901_408_320
    with pytest.raises(ModelFolderError, match="'blocks' is part of no weight's name"):
        policy_size(load_config(PAPER, ["model.trained_modules=[blocks]"]))


def test_sizes_come_from_the_model_folder(tmp_path: Path) -> None:
    folder = copy_flux(tmp_path / "flux")
    one_block = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps({**one_block, "num_layers": 1}))
    size = policy_size(load_config(QUICKSTART, [f"model.path={folder}"]))
    assert size.source == str(folder)
    assert size.parameters < policy_size(load_config(QUICKSTART)).parameters


def test_broken_model_folder_is_named(tmp_path: Path) -> None:
    folder = copy_flux(tmp_path / "flux")
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"vae/config\.json"):
        policy_size(load_config(QUICKSTART, [f"model.path={folder}"]))


def test_vit_h_14() -> None:
    size = scorer_size("ViT-H-14")
    assert size.parameters == 986_109_441
    # 32 layers of width 1280 on 257 tokens: 24 x tokens x width^2 + 4 x tokens^2 x width.
    layers = 32 * (24 * 257 * 1280**2 + 4 * 257**2 * 1280)
    assert size.image.tflop * 1e12 == pytest.approx(layers, rel=0.01)


def test_both_passes_of_classifier_free_guidance_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Guided(Flux1):
        def passes(self, guidance: float) -> int:
            return 2 if guidance > 1 else 1

        def velocity(self, *arguments: Any) -> Tensor:
            both = [super(Guided, self).velocity(*arguments) for _ in range(2)]
            return both[0] + (both[1] - both[0])

    config = load_config(QUICKSTART, ["model.lora.rank=1", "model.gradient_checkpointing=false"])
    plain, kept = policy_size(config), learner_bytes(config)
    monkeypatch.setattr(families, "FAMILIES", (Guided,))
    guided = policy_size(config)
    assert (plain.passes, guided.passes) == (1, 2)
    assert guided.evaluation.matrix == 2 * plain.evaluation.matrix
    assert guided.evaluation.attention == 2 * plain.evaluation.attention
    # Both passes are kept for the backward pass.
    assert learner_bytes(config) > 1.5 * kept
