"""MetricsLog and its sinks, and the documentation of the names."""

import json
import math
import re
import struct
import sys
import tracemalloc
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from g2rpo_ray.common.files import DiskError
from g2rpo_ray.config import Config
from g2rpo_ray.config.operation import TrackingSection
from g2rpo_ray.run.scores import evaluated_iterations
from g2rpo_ray.tracking.metrics import MetricsLog, read_metrics
from g2rpo_ray.tracking.names import METRICS, TrackingError, known_name
from g2rpo_ray.tracking.sinks import JsonLines

PROJECT = Path(__file__).parents[2]
ONLY_LINES = TrackingSection(tensorboard=False)


def record_iterations(run_dir: Path, iterations: range, resume: int | None = None) -> None:
    with MetricsLog(run_dir, ONLY_LINES, {}, resume) as log:
        for iteration in iterations:
            log.record(iteration, {"policy/loss": iteration / 10})


def test_every_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, ONLY_LINES, {}) as log:
        log.record(0, {"heldout/hps": 0.5})
        log.record(1, {"reward/hps/mean": 0.25, "weight_version": 1})
        assert read_metrics(tmp_path) == [
            {"iteration": 0, "kind": "evaluation", "heldout/hps": 0.5},
            {"iteration": 1, "kind": "train", "reward/hps/mean": 0.25, "weight_version": 1},
        ]


def test_resume_drops_what_will_be_recorded_again(tmp_path: Path) -> None:
    record_iterations(tmp_path, range(1, 6))
    record_iterations(tmp_path, range(4, 7), resume=4)
    assert [record["iteration"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"iteration": 3, "ki', "{", '{"iteration": 3}'[:-1], "\0\0\0"])
def test_a_line_cut_short_is_dropped(tmp_path: Path, torn: str) -> None:
    record_iterations(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert [record["iteration"] for record in read_metrics(tmp_path)] == [1, 2]
    record_iterations(tmp_path, range(3, 4), resume=3)
    assert [record["iteration"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_looking_for_evaluations_costs_no_more_memory_in_a_longer_run(tmp_path: Path) -> None:
    """A run looks for them at each one: after a week its driver must not be larger for it."""
    config = cast(Config, SimpleNamespace(run_dir=str(tmp_path)))

    def peak_bytes(iterations: int) -> int:
        train = json.dumps(
            {"iteration": 1, "kind": "train"} | {f"time/{n}_s": n for n in range(50)}
        )
        evaluation = json.dumps({"iteration": 1, "kind": "evaluation", "heldout/clip": 0.5})
        (tmp_path / "metrics.jsonl").write_text(f"{train}\n" * iterations + f"{evaluation}\n")
        tracemalloc.start()
        try:
            assert evaluated_iterations(config) == {1}
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(1000) < 1.2 * peak_bytes(100)


@pytest.mark.parametrize(
    "broken",
    [
        "nonsense",
        "[1]",
        '{"iteration": 2}',
        '{"kind": "train"}',
        '{"iteration": 2, "kind": "evaluation", "heldout/hps": "x"}',
    ],
)
def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path, broken: str) -> None:
    good = '{"iteration": 1, "kind": "train"}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{broken}\n{good}\n")
    with pytest.raises(TrackingError, match=r"metrics\.jsonl, line 2.*; remove that line"):
        read_metrics(tmp_path)


def test_folders_and_files_in_each_others_place_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrackingError, match=r"metrics\.jsonl is a folder"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").rmdir()
    (tmp_path / "tensorboard").touch()
    with (
        pytest.raises(TrackingError, match="tensorboard: cannot be written"),
        MetricsLog(tmp_path, TrackingSection(), {}),
    ):
        pytest.fail("a file was taken for a folder")


def test_a_new_run_does_not_append_to_an_old_one(tmp_path: Path) -> None:
    record_iterations(tmp_path, range(1, 3))
    with pytest.raises(TrackingError, match="already holds the metrics of a run"):
        record_iterations(tmp_path, range(1, 3))


def test_a_full_disk_names_the_file() -> None:
    sink = JsonLines(Path("/dev/full"), None)
    with pytest.raises(DiskError, match=r"/dev/full: cannot be written: No space left"):
        sink.scalars(3, {"loss/policy": 1.0})
    sink.close()


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, ONLY_LINES, {}) as log:
        log.record(
            1, {"policy/loss": math.nan, "policy/grad_norm": math.inf, "policy/approx_kl": 0}
        )
    line = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert record["policy/loss"] is None
    assert record["policy/grad_norm"] is None
    assert record["policy/approx_kl"] == 0


@pytest.mark.parametrize(
    "name", ["policy/lss", "reward/hps", "reward/HPS/mean", "heldout/a/b", "loss"]
)
def test_an_unknown_name_is_an_error_and_writes_nothing(tmp_path: Path, name: str) -> None:
    with (
        MetricsLog(tmp_path, ONLY_LINES, {}) as log,
        pytest.raises(TrackingError, match=f"'{name}'.*allowed"),
    ):
        log.record(1, {"policy/loss": 0.0, name: 1.0})
    assert read_metrics(tmp_path) == []


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, TrackingSection(), {}) as log:
        for iteration in (1, 2, 3):
            log.record(iteration, {"reward/hps/mean": iteration / 4})
        log.pictures(3, {"a red circle": np.full((8, 8, 3), 200, np.uint8)})
    with MetricsLog(tmp_path, TrackingSection(), {}, resume_iteration=3) as log:
        log.record(3, {"reward/hps/mean": 1.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward/hps/mean")]
    assert points == [(1, 0.25), (2, 0.5), (3, 1.0)]


def test_pictures_reach_tensorboard(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, TrackingSection(), {}) as log:
        log.pictures(3, {"a red circle": np.full((8, 6, 3), 200, np.uint8)})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images(events.Tags()["images"][0])
    assert (image.step, image.height, image.width) == (3, 8, 6)


@pytest.mark.parametrize("picture", [np.zeros((8, 8, 3), np.float32), np.zeros((8, 8), np.uint8)])
def test_a_picture_of_another_form_is_an_error(tmp_path: Path, picture: np.ndarray) -> None:
    with (
        MetricsLog(tmp_path, ONLY_LINES, {}) as log,
        pytest.raises(TrackingError, match=r"expected uint8 \[height, width, 3\]"),
    ):
        log.pictures(1, {"a red circle": picture})


def test_wandb_absent_is_a_clear_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracking = TrackingSection(tensorboard=False, wandb_project="flux")
    with pytest.raises(TrackingError, match=r"tracking\.wandb_project.*g2rpo-ray\[wandb\]"):
        MetricsLog(tmp_path, tracking, {}).__enter__()
    assert not list(tmp_path.iterdir())


def test_wandb_gets_every_number_and_a_resumed_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []
    identities = []
    own_steps = {}

    class Run:
        def log(self, values: dict[str, Any], step: int) -> None:
            logged.append((step, values))

        def define_metric(self, name: str, step_metric: str) -> None:
            own_steps[name] = step_metric

        def finish(self) -> None:
            logged.append((-1, {}))

    def init(**settings: Any) -> Run:
        identities.append(settings["id"])
        assert settings["project"] == "flux"
        assert settings["config"] == {"seed": 3}
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    tracking = TrackingSection(tensorboard=False, wandb_project="flux")
    for resume in (None, 2):
        with MetricsLog(tmp_path, tracking, {"seed": 3}, resume) as log:
            log.record(1, {"policy/loss": 0.5})
            # Of an evaluation beside the training; W&B drops what is logged at an earlier step.
            log.record(0, {"heldout/hps": 0.3})
    late = {"heldout/hps": 0.3, "evaluation/iteration": 0}
    assert logged == [(1, {"policy/loss": 0.5}), (1, late), (-1, {})] * 2
    assert own_steps["heldout/*"] == "evaluation/iteration"
    assert identities[0] == identities[1]


def test_an_offline_run_of_wandb_has_the_names_of_the_other_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="needs g2rpo-ray[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracking = TrackingSection(tensorboard=True, wandb_project="flux")
    with MetricsLog(tmp_path, tracking, {"seed": 3}) as log:
        log.record(1, {"policy/loss": 0.5, "reward/hps/mean": 0.25})
        log.record(1, {"heldout/hps": 0.3})
        log.pictures(1, {"a red circle": np.zeros((8, 8, 3), np.uint8)})
    # Its service writes on after the run has finished.
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = wandb_history(file)
    lines = read_metrics(tmp_path)
    numbers = {name: value for line in lines for name, value in line.items() if "/" in name}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(numbers)
    # Beside these: the step of evaluations, the pictures, and W&B's own with an underscore.
    own = {"evaluation/iteration"}
    assert {n for n in written if not n.startswith(("_", "pictures/"))} == {*numbers, *own}
    assert written["pictures/captions"] == ["a red circle"]
    assert {name: written[name] for name in numbers} == numbers


def wandb_history(file: Path) -> dict[str, Any]:
    """Last value of every name in an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record

    written: dict[str, Any] = {}
    for data in leveldb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for item in record.history.item:
            written["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return written


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format, which W&B's files have behind seven bytes of their own.

    Blocks of 32 KiB hold parts of records: CRC, length, kind (1 whole, 2 first, 4 last), content.
    """
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_exported_names_are_what_prometheus_allows() -> None:
    assert known_name("reward/hps/mean").exported == "g2rpo_reward_mean"
    assert known_name("reward/hps/mean").reward == "hps"
    assert known_name("heldout/clip").exported == "g2rpo_heldout"
    assert known_name("groups/dropped").exported == "g2rpo_groups_dropped_total"
    exported = {metric.exported for metric in METRICS.values()}
    assert len(exported) == len(METRICS)
    assert all(name.isidentifier() for name in exported)


class FakeMetric:
    """Stands for Ray's Gauge and Histogram; keeps the values by tags."""

    made: ClassVar[dict[str, "FakeMetric"]] = {}

    def __init__(
        self,
        name: str,
        description: str,
        tag_keys: tuple[str, ...],
        boundaries: Sequence[float] = (),
    ) -> None:
        self.description, self.tag_keys, self.boundaries = description, tag_keys, boundaries
        self.values: list[tuple[float, dict[str, str]]] = []
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.values.append((value, tags))

    observe = set


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeMetric]:
    """What was exported while Ray seems to be initialised, by name."""
    import ray
    import ray.util.metrics

    FakeMetric.made.clear()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util.metrics, "Gauge", FakeMetric)
    monkeypatch.setattr(ray.util.metrics, "Histogram", FakeMetric)
    return FakeMetric.made


def test_every_number_reaches_rays_endpoint(
    tmp_path: Path, endpoint: dict[str, FakeMetric]
) -> None:
    run_dir = tmp_path / "mine"
    with MetricsLog(run_dir, ONLY_LINES, {}) as log:
        log.record(1, {"reward/hps/mean": 0.5, "reward/clip/mean": 0.9, "time/learn_s": 8})
        log.live({"run/iterations": 40})
        log.observe("rollout/prompt_s", [3.0, 4.0])
    reward = endpoint["g2rpo_reward_mean"]
    assert "Unit: 1" in reward.description
    assert reward.values == [
        (0.5, {"run": "mine", "reward": "hps"}),
        (0.9, {"run": "mine", "reward": "clip"}),
    ]
    assert endpoint["g2rpo_time_learn_s"].values == [(8.0, {"run": "mine"})]
    assert endpoint["g2rpo_run_iteration"].values == [(1.0, {"run": "mine"})]
    assert endpoint["g2rpo_run_iterations"].values == [(40.0, {"run": "mine"})]
    assert [value for value, _ in endpoint["g2rpo_rollout_prompt_s"].values] == [3.0, 4.0]
    assert read_metrics(run_dir) == [
        {"iteration": 1, "kind": "train", "reward/hps/mean": 0.5, "reward/clip/mean": 0.9,
         "time/learn_s": 8}
    ]  # fmt: skip


def test_an_evaluation_beside_the_training_does_not_turn_the_iteration_back(
    tmp_path: Path, endpoint: dict[str, FakeMetric]
) -> None:
    with MetricsLog(tmp_path, ONLY_LINES, {}) as log:
        log.record(24, {"policy/grad_norm": 0.5})
        log.record(20, {"heldout/hps": 0.5})
    assert [value for value, _ in endpoint["g2rpo_run_iteration"].values] == [24.0, 24.0]


def test_counters_add_up_and_start_at_0(tmp_path: Path, endpoint: dict[str, FakeMetric]) -> None:
    with MetricsLog(tmp_path, ONLY_LINES, {}) as log:
        for iteration, dropped in enumerate((0, 2, math.nan, 1), start=1):
            log.record(iteration, {"groups/dropped": dropped})
    values = [value for value, _ in endpoint["g2rpo_groups_dropped_total"].values]
    assert values == [0.0, 2.0, 3.0]


def test_a_number_that_ray_would_not_export_is_counted(
    tmp_path: Path, endpoint: dict[str, FakeMetric]
) -> None:
    with MetricsLog(tmp_path, ONLY_LINES, {}) as log:
        log.record(1, {"policy/loss": 0.5, "policy/grad_norm": 1.0})
        log.record(2, {"policy/loss": math.nan, "policy/grad_norm": math.inf})
    assert [value for value, _ in endpoint["g2rpo_policy_loss"].values] == [0.5]
    assert [value for value, _ in endpoint["g2rpo_run_not_finite_total"].values] == [0.0, 2.0]


def test_without_ray_nothing_is_exported(tmp_path: Path, endpoint: dict[str, FakeMetric]) -> None:
    import ray

    with pytest.MonkeyPatch.context() as patch, MetricsLog(tmp_path, ONLY_LINES, {}) as log:
        patch.setattr(ray, "is_initialized", lambda: False)
        log.record(1, {"policy/loss": 0.5})
        log.observe("rollout/prompt_s", [1.0])
    assert not endpoint


def test_every_row_of_the_table_is_read() -> None:
    table = (PROJECT / "g2rpo_ray" / "tracking" / "metrics.md").read_text(encoding="utf-8")
    assert list(METRICS) == re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert {metric.kind for metric in METRICS.values()} == {"gauge", "counter", "histogram"}
    assert METRICS["policy/max_abs_log_ratio"].meaning.startswith("Largest |Δlog p| over all")
