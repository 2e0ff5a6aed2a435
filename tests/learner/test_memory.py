"""A rank whose memory ends says so in its own words: it would end again, and is not rebuilt."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from g2rpo_ray.learner.waiting import as_it_says
from g2rpo_ray.learner.worker import Learner
from g2rpo_ray.models.batches import DeviceMemoryError
from tests.tiny import tiny_config


def test_memory_that_ends_in_an_update_names_what_needs_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("g2rpo_ray.learner.worker.update_on_groups", fail)
    monkeypatch.setattr(ray, "get", lambda refs: [SimpleNamespace(iteration=1) for _ in refs])
    learner = Learner(tiny_config(tmp_path, "learner.ranks=1"), 0)
    learner.engine, learner.device = None, torch.device("cpu")  # type: ignore[assignment]
    with pytest.raises(DeviceMemoryError) as caught:
        learner.update([None])
    said = str(caught.value)
    assert said.startswith("a learner rank's update: no room beside what is on the device (CUDA")
    assert "Tried to allocate 2.00 GiB" in said
    assert "learner.gpus_per_rank gives it more" in said
    assert "model.gradient_checkpointing=true" in said
    assert as_it_says(caught.value, "update") is caught.value
