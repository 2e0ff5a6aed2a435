"""LearnerGroup: what its ranks cannot do is said in the learner's own words."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from g2rpo_ray.learner.checkpoint import (
    WEIGHTS_FILE,
    CheckpointError,
    CheckpointInfo,
    write_checkpoint,
)
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.group import LearnerGroup
from tests.tiny import CAPTIONS, draw_groups, encode, tiny_config


@pytest.fixture(scope="module")
def placement(ray_cluster: None) -> Iterator[PlacementGroup]:  # noqa: ARG001
    group = placement_group([{"CPU": 0.25}])
    assert group.wait(60)
    yield group
    remove_placement_group(group)


def test_a_damaged_checkpoint_is_named_and_ends_the_start(
    placement: PlacementGroup, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "iteration_000001"
    state = {"weight.a": torch.ones(2), "exp_avg.a": torch.ones(2), "exp_avg_sq.a": torch.ones(2)}
    write_checkpoint(checkpoint, CheckpointInfo(1, 1, 1, 1, 1.0, "full", 0), state)
    file = checkpoint / WEIGHTS_FILE.format(0)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        LearnerGroup(tiny_config(tmp_path / "run", "learner.ranks=1"), placement, checkpoint)
    assert f"{file}: damaged" in str(caught.value)


def test_a_rank_that_fails_dies_or_does_not_answer_is_named_with_what_it_did(
    placement: PlacementGroup, tmp_path: Path
) -> None:
    group = LearnerGroup(
        tiny_config(tmp_path / "run", "learner.ranks=1", "learner.max_failures=0"), placement, None
    )
    assert "parameters in" in group.coverage
    with pytest.raises(LearnerError) as caught:
        group.update([ray.put("no group")])
    assert "learner: 'update' failed with AttributeError" in str(caught.value)
    group._timeout_s = 0.0
    with pytest.raises(LearnerError) as caught:
        group.checksum()
    assert "'checksum' did not end within 0 s (learner.timeout_s)" in str(caught.value)
    group._timeout_s = 60.0
    ray.kill(group.ranks[0])
    with pytest.raises(LearnerError, match="a rank died during 'checksum'") as caught:
        group.checksum()
    report = str(caught.value)
    assert "learner.max_failures is 0" in report
    assert "learner rank 0, pid" in report
    assert "process: gone" in report
    assert "node's memory now" in report
    assert "last lines of" in report
    assert "--resume auto" in report


def test_a_lost_rank_leaves_the_weights_as_they_would_have_been(
    placement: PlacementGroup, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path / "run", "learner.ranks=1")
    groups = [ray.put(group) for group in draw_groups(config, encode(config, CAPTIONS[:2]))]
    quiet = LearnerGroup(config, placement, None)
    for _ in range(3):
        quiet.update(groups)
    expected = quiet.checksum()
    quiet.close()

    told: list[str] = []
    group = LearnerGroup(config, placement, None, told.append)
    first = group.update(groups)
    # From the base model, with the first update made again.
    ray.kill(group.ranks[0])
    group.update(groups)
    group.snapshot(tmp_path / "iteration_000002", CheckpointInfo(2, 2, 2, 0, 0.0, "full", 0))
    third = group.update(groups)
    # From the snapshot, with only the third made again.
    ray.kill(group.ranks[0])
    assert group.checksum() == expected
    assert (group.rebuilds, group.version, len(group._updates)) == (2, 3, 1)
    assert first.grad_norms != third.grad_norms
    assert all("rebuilding the learner" in line for line in told)
    group.close()
