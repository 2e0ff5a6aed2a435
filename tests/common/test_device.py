"""Computing the same bits in every run."""

from pathlib import Path

import pytest
import torch
from torch._inductor import config as compiler
from torch._inductor import graph
from torch._inductor.utils import fresh_cache

from g2rpo_ray.common.device import compute_the_same_bits
from g2rpo_ray.learner import worker
from g2rpo_ray.models.loading import load_part
from g2rpo_ray.models.policy import load_policy
from tests.tiny import tiny_config


@pytest.mark.usefixtures("as_it_was")
def test_a_policy_computes_the_same_bits_where_the_run_is_to(tmp_path: Path) -> None:
    load_policy(tiny_config(tmp_path))
    assert not compiler.deterministic
    load_policy(tiny_config(tmp_path, "model.deterministic=true"))
    assert compiler.deterministic
    assert torch.backends.cudnn.deterministic
    # Whoever draws has no backward passes, and keeps the fastest attention.
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.usefixtures("as_it_was")
def test_every_compilation_of_a_process_computes_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch sets its compiler anew after each, in that thread's settings or in all threads'."""
    found = []
    lower = graph.GraphLowering.run

    def watched(self: graph.GraphLowering, *inputs: object) -> object:
        found.append(compiler.deterministic)
        return lower(self, *inputs)

    monkeypatch.setattr(graph.GraphLowering, "run", watched)
    compute_the_same_bits()
    with fresh_cache():
        for factor in (2, 3):
            torch.compile(lambda x, factor=factor: x.softmax(-1) * factor)(torch.ones(4, 4))
    assert found == [True, True]
    assert compiler.deterministic


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("asked", [False, True])
def test_a_rank_adds_in_one_order_where_the_run_is_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(worker, "LearnerEngine", lambda *_, **__: None)
    rank = worker.Learner(tiny_config(tmp_path, f"model.deterministic={asked}"), 0)
    rank.device = torch.device("cpu")
    rank._load(load_part, None)  # type: ignore[arg-type]
    assert torch.are_deterministic_algorithms_enabled() == asked
