"""The learner on real DeepSpeed ranks: what it computes depends on neither ranks nor sharding."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from g2rpo_ray.learner.checkpoints.format import CheckpointError, CheckpointInfo
from g2rpo_ray.learner.engine import LearnerError
from g2rpo_ray.learner.update import UpdateReport
from g2rpo_ray.models.weights import WeightMismatchError
from g2rpo_ray.sampling.group import RolloutGroup
from tests.learner.rank_groups import (
    FEW_ADAPTERS,
    ROUNDING,
    Ranks,
    State,
    part,
    relative_error,
    small_config,
)
from tests.tiny import draw_groups, encode, equal_weights

MODES = {
    "full": ["learner.update=per_iteration"],
    "lora": ["learner.update=per_sde_step", *FEW_ADAPTERS, "learner.learning_rate=1e-3"],
}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def groups(mode: str, run_dir: Path) -> list[RolloutGroup]:
    """Four prompts' groups of two SDE steps."""
    config = small_config(run_dir, *MODES[mode])
    return draw_groups(config, encode(config))


@pytest.fixture(scope="module")
def expected(
    mode: str, groups: list[RolloutGroup], ranks: dict[int, Ranks]
) -> Mapping[int, tuple[State, list[float]]]:
    """State and gradient norms after the first iteration by number of prompts: one rank, ZeRO 1."""
    results = {}
    for prompts in (3, 4):
        ranks[1].start(*MODES[mode], "learner.zero_stage=1")
        reports = ranks[1].update(groups[:prompts])
        results[prompts] = (ranks[1].state(), reports[0].grad_norms)
    return results


def start_and_update(
    ranks: Ranks, mode: str, groups: list[RolloutGroup], *overrides: str
) -> tuple[State, list[UpdateReport]]:
    ranks.start(*MODES[mode], *overrides)
    reports = ranks.update(groups)
    return ranks.state(), reports


# Stage 2, which most tests here are of, is in make test-long.
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_an_update_whose_groups_are_all_dropped_moves_no_weight(
    ranks: dict[int, Ranks], mode: str, groups: list[RolloutGroup], stage: int
) -> None:
    settings = ("advantage.on_invalid=drop_group", f"learner.zero_stage={stage}")
    before, _ = start_and_update(ranks[2], mode, groups[:3], *settings)
    lost = [replace(g, rewards=torch.full_like(g.rewards, math.nan)) for g in groups[:3]]
    reports = ranks[2].update(lost)
    assert not any(record.valid for report in reports for record in report.records)
    after = ranks[2].state()
    assert torch.equal(part(after, "weight."), part(before, "weight."))
    # One group is enough, on whichever rank.
    ranks[2].update([lost[0], groups[1], lost[2]])
    assert not torch.equal(part(ranks[2].state(), "weight."), part(before, "weight."))


# Three prompts on two ranks: one rank repeats a prompt, which must not count.
@pytest.mark.parametrize(
    ("stage", "count", "prompts"),
    [(1, 2, 3), (2, 1, 3), (2, 2, 3), (2, 2, 4), (3, 1, 3), (3, 2, 3)],
)
def test_the_first_update_depends_on_neither_ranks_nor_zero_stage(
    ranks: dict[int, Ranks],
    mode: str,
    groups: list[RolloutGroup],
    expected: Mapping[int, tuple[State, list[float]]],
    stage: int,
    count: int,
    prompts: int,
) -> None:
    state, reports = start_and_update(
        ranks[count], mode, groups[:prompts], f"learner.zero_stage={stage}"
    )
    expected_state, grad_norms = expected[prompts]
    for report in reports:
        assert report.grad_norms == pytest.approx(grad_norms, rel=ROUNDING)
    assert state.keys() == expected_state.keys()
    for prefix in ("weight.", "exp_avg.", "exp_avg_sq."):
        error = relative_error(part(state, prefix), part(expected_state, prefix))
        assert error < ROUNDING, f"{prefix} differs by {error:.1e}"
    records = sorted((r.group_id, r.position) for report in reports for r in report.records)
    assert records == [(group, step) for group in range(prompts) for step in range(2)]
    first = [r for report in reports for r in report.records if r.update == 0]
    assert max(record.health.max_abs_log_ratio for record in first) < ROUNDING


def test_an_update_changes_every_trained_tensor(
    ranks: dict[int, Ranks], mode: str, expected: Mapping[int, tuple[State, list[float]]]
) -> None:
    ranks[1].start(*MODES[mode])
    before, (after, grad_norms) = ranks[1].state(), expected[4]
    unchanged = [n for n in before if n.startswith("weight.") and before[n].equal(after[n])]
    assert unchanged == []
    assert len(grad_norms) == (1 if "per_iteration" in MODES[mode][0] else 2)


@pytest.mark.parametrize("count", [1, 2])
def test_a_repeated_update_is_equal_to_the_bit(
    ranks: dict[int, Ranks], mode: str, groups: list[RolloutGroup], count: int
) -> None:
    first, _ = start_and_update(ranks[count], mode, groups[:3])
    second, _ = start_and_update(ranks[count], mode, groups[:3])
    assert equal_weights(first, second)


@pytest.mark.parametrize(("count", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_a_checkpoint_continues_to_the_bit_and_on_another_number_of_ranks(
    ranks: dict[int, Ranks],
    mode: str,
    groups: list[RolloutGroup],
    tmp_path: Path,
    count: int,
    stage: int,
) -> None:
    overrides = [*MODES[mode], f"learner.zero_stage={stage}"]
    checkpoint = tmp_path / "run" / "checkpoints" / "iteration_000001"
    at_save, reports = start_and_update(ranks[count], mode, groups[:2], *overrides[1:])
    updates = len(reports[0].grad_norms)
    ranks[count].save(checkpoint, CheckpointInfo(1, 1, updates, 1, 1.0, mode, 0))
    ranks[count].update(groups[2:])
    uninterrupted = ranks[count].state()

    ranks[count].start(*overrides, checkpoint=checkpoint)
    assert equal_weights(ranks[count].state(), at_save)
    ranks[count].update(groups[2:])
    assert equal_weights(ranks[count].state(), uninterrupted)

    ranks[3 - count].start(*overrides, checkpoint=checkpoint)
    ranks[3 - count].update(groups[2:])
    other = ranks[3 - count].state()
    error = relative_error(part(other, "weight."), part(uninterrupted, "weight."))
    assert error < ROUNDING


def test_the_moving_average_follows_the_weights_and_survives_a_resume(
    ranks: dict[int, Ranks], groups: list[RolloutGroup], mode: str, tmp_path: Path
) -> None:
    overrides = [*MODES[mode], "learner.ema_decay=0.75", "learner.zero_stage=3"]
    checkpoint = tmp_path / "run" / "checkpoints" / "iteration_000001"
    ranks[2].start(*overrides)
    weights = [part(ranks[2].state(), "weight.")]
    updates = 0
    for _ in range(2):
        reports = ranks[2].update(groups[:2])
        updates += len(reports[0].grad_norms)
        weights.append(part(ranks[2].state(), "weight."))
    if updates == 2:
        expected = 0.75 * (0.75 * weights[0] + 0.25 * weights[1]) + 0.25 * weights[2]
        torch.testing.assert_close(part(ranks[2].state(), "ema."), expected, rtol=0, atol=1e-6)
    ranks[2].save(checkpoint, CheckpointInfo(2, 2, updates, 1, 1.0, mode, 0))
    ranks[2].update(groups[2:])
    uninterrupted = ranks[2].state()
    ranks[2].start(*overrides, checkpoint=checkpoint)
    ranks[2].update(groups[2:])
    assert equal_weights(ranks[2].state(), uninterrupted)


def test_steps_that_share_a_pass_change_only_rounding(
    ranks: dict[int, Ranks], groups: list[RolloutGroup]
) -> None:
    overrides = ["learner.update=per_iteration"]
    results = []
    for steps in (1, 2):
        ranks[2].start(*overrides, f"learner.steps_per_pass={steps}")
        reports = ranks[2].update(groups[:3])
        results.append((part(ranks[2].state(), "exp_avg."), reports))
    assert relative_error(results[1][0], results[0][0]) < ROUNDING
    for one, two in zip(results[0][1], results[1][1], strict=True):
        assert one.grad_norms == pytest.approx(two.grad_norms, rel=ROUNDING)
        keys = [[(r.group_id, r.position) for r in report.records] for report in (one, two)]
        assert sorted(keys[0]) == sorted(keys[1])
        losses = [{(r.group_id, r.position): r.loss for r in x.records} for x in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_offloading_the_optimizer_changes_only_rounding(
    ranks: dict[int, Ranks],
    mode: str,
    groups: list[RolloutGroup],
    expected: Mapping[int, tuple[State, list[float]]],
    stage: int,
) -> None:
    state, reports = start_and_update(
        ranks[2], mode, groups[:3], f"learner.zero_stage={stage}", "learner.offload_optimizer=true"
    )
    expected_state, grad_norms = expected[3]
    assert reports[0].grad_norms == pytest.approx(grad_norms, rel=ROUNDING)
    assert relative_error(part(state, "weight."), part(expected_state, "weight.")) < ROUNDING


def test_a_checkpoint_of_other_weights_is_refused(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "iteration_000001"
    ranks[1].start(*MODES["lora"])
    ranks[1].save(checkpoint, CheckpointInfo(1, 1, 1, 1, 1.0, "lora", 0))
    with pytest.raises(WeightMismatchError, match=r"belongs to another model\.path"):
        ranks[1].start("model.lora.rank=8", checkpoint=checkpoint)
    with pytest.raises(WeightMismatchError, match=r"belongs to another model\.path"):
        ranks[1].start(*MODES["full"], checkpoint=checkpoint)


def test_a_checkpoint_that_cannot_be_begun_names_the_cause_on_every_rank(
    ranks: dict[int, Ranks], groups: list[RolloutGroup], mode: str, tmp_path: Path
) -> None:
    ranks[2].start(*MODES[mode])
    (tmp_path / "checkpoints").write_text("in the way")
    folder = tmp_path / "checkpoints" / "iteration_000001"
    with pytest.raises(CheckpointError, match="cannot be written: "):
        ranks[2].call("begin_save", folder, CheckpointInfo(1, 1, 1, 1, 1.0, mode, 0))
    ranks[2].update(groups[:2])


def test_bfloat16_continues_from_its_float32_weights(
    ranks: dict[int, Ranks], run_dir: Path, tmp_path: Path
) -> None:
    overrides = ["model.dtype=bfloat16", "learner.learning_rate=1e-5"]
    config = small_config(run_dir, *overrides)
    groups = draw_groups(config, encode(config)[:2])
    checkpoint = tmp_path / "run" / "checkpoints" / "iteration_000001"
    ranks[1].start(*overrides)
    ranks[1].update(groups)
    ranks[1].save(checkpoint, CheckpointInfo(1, 1, 1, 1, 1.0, "full", 0))
    ranks[1].update(groups)
    uninterrupted = ranks[1].state()
    assert not equal_weights(
        {n: t.bfloat16().float() for n, t in uninterrupted.items()}, uninterrupted
    )
    ranks[1].start(*overrides, checkpoint=checkpoint)
    ranks[1].update(groups)
    assert equal_weights(ranks[1].state(), uninterrupted)


def test_groups_of_other_batch_sizes_do_not_part_the_ranks(
    ranks: dict[int, Ranks], run_dir: Path
) -> None:
    overrides = ["algorithm=mix_grpo", "mix_grpo.window=2", "learner.zero_stage=3"]
    config = small_config(run_dir, *overrides)
    first, second = draw_groups(config, encode(config)[:2])
    # One worker had to halve its batch: these two would be one pass and two, each with collectives.
    groups = [replace(first, batch_size=4), replace(second, batch_size=2)]
    norms = []
    for group in ranks.values():
        group.start(*overrides)
        norms += [report.grad_norms for report in group.update(groups)]
    assert norms[1] == norms[2]
    assert norms[0][0] == pytest.approx(norms[1][0], rel=ROUNDING)


# Two ranks have every stage and both dtypes in CI, and the rest in make test-long.
@pytest.mark.parametrize(
    ("count", "value", "overrides"),
    [
        pytest.param(
            count,
            value,
            [f"model.dtype={dtype}", f"learner.zero_stage={stage}"],
            marks=pytest.mark.long if count == 2 and (dtype == "bfloat16") != (stage == 2) else (),
        )
        for count, value in ((1, float("inf")), (2, float("nan")))
        for dtype in ("float32", "bfloat16")
        for stage in (1, 2, 3)
    ],
)
def test_a_gradient_that_is_no_number_stops_the_run(
    ranks: dict[int, Ranks], count: int, value: float, overrides: list[str]
) -> None:
    ranks[count].start(*MODES["full"], *overrides)
    before = ranks[count].state()
    with pytest.raises(LearnerError) as caught:
        ranks[count].call("step_with_gradient", value)
    message = str(caught.value)
    assert "the gradient norm of update 0 is" in message
    assert "resume from the last checkpoint" in message
    assert equal_weights(ranks[count].state(), before)


def test_a_failure_to_compile_names_the_setting(ranks: dict[int, Ranks]) -> None:
    with pytest.raises(LearnerError) as caught:
        ranks[1].start_without_compiler(*MODES["full"])
    message = str(caught.value)
    assert "torch.compile failed on the learner's blocks" in message
    assert "no compiler for this card" in message
    assert "learner.compile=false" in message


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_first_update_finds_all_code_compiled(
    checkpointing: bool,
    ranks: dict[int, Ranks],
    mode: str,
    groups: list[RolloutGroup],
    expected: Mapping[int, tuple[State, list[float]]],
) -> None:
    overrides = [f"model.gradient_checkpointing={str(checkpointing).lower()}", "learner.ranks=1"]
    overrides += [*MODES[mode], "learner.compile=true", "learner.zero_stage=2"]
    config = small_config(ranks[1].run_dir, *overrides)
    refs = [ray.put(group) for group in groups[:3]]
    ((at_start, then, report),) = ranks[1].call("codes_compiled", config, refs, ranks[1].meeting)
    assert 0 < at_start == then
    # And the update is the one of ranks that start without it.
    state, grad_norms = expected[3]
    assert report.grad_norms == pytest.approx(grad_norms, rel=1e-4)
    assert relative_error(part(ranks[1].state(), "weight."), part(state, "weight.")) < ROUNDING
