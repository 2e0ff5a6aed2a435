"""Every family on real DeepSpeed ranks: two are as one, under ZeRO 3 too; all weights export."""

from pathlib import Path

import pytest
import torch

from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.models.families import open_family
from g2rpo_ray.run.export import export
from g2rpo_ray.run.weights import trained_kind
from tests.learner.rank_groups import ROUNDING, Ranks, part, relative_error
from tests.models.families.folders import TINY, family_config, tiny_folder
from tests.tiny import draw_groups, encode

# One family with two passes in CI; the learner asks the others the same through `Family`.
NAMES = [
    pytest.param(name, marks=[] if name == "sd3" else pytest.mark.long, id=name) for name in TINY
]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_as_one_and_all_weights_are_exported(
    ranks: dict[int, Ranks], name: str, tmp_path: Path
) -> None:
    settings = ("learner.update=per_iteration", "learner.learning_rate=1e-3")
    config = family_config(name, *settings, run_dir=tmp_path)
    # Three on two ranks: one of them repeats a prompt, which must not count.
    groups = draw_groups(config, encode(config)[:3])
    states, norms = {}, {}
    for count, stage in ((1, 1), (2, 2), (2, 3)):
        overrides = (*settings, f"learner.ranks={count}", f"learner.zero_stage={stage}")
        ranks[count].start_as(family_config(name, *overrides))
        reports = ranks[count].update(groups)
        first = [record.health.max_abs_log_ratio for r in reports for record in r.records]
        # Exactly 0 in one process (test_families); ZeRO lays the weights elsewhere in memory.
        assert max(first) < ROUNDING
        states[count, stage], norms[count, stage] = ranks[count].state(), reports[0].grad_norms
    expected = states[1, 1]
    for key in ((2, 2), (2, 3)):
        assert norms[key] == pytest.approx(norms[1, 1], rel=ROUNDING)
        for prefix in ("weight.", "exp_avg.", "exp_avg_sq."):
            error = relative_error(part(states[key], prefix), part(expected, prefix))
            assert error < ROUNDING, f"{key}: {prefix} differs by {error:.1e}"

    info = CheckpointInfo(1, 1, 1, 1, 1.0, trained_kind(config.model), config.seed)
    ranks[2].save(checkpoint_folder(tmp_path, 1), info)
    assert export(config, tmp_path / "all").form == "full"
    network = (
        open_family(tiny_folder(name))
        .pipeline_class.from_pretrained(tiny_folder(name), torch_dtype=torch.float32)
        .transformer
    )
    base = network.state_dict()
    found = type(network).from_pretrained(tmp_path / "all").state_dict()
    state = states[2, 3]
    assert found.keys() == base.keys()
    for tensor, weights in found.items():
        # A buffer is not trained: SD3's table of places.
        trained = state.get(f"weight.{tensor}", base[tensor]).view_as(weights)
        assert torch.equal(weights, trained)
    assert any(not torch.equal(found[tensor], base[tensor]) for tensor in base)
