"""Room for a run: what is short is named at once, waiting is said and ends, secrets stay."""

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from ray.autoscaler._private.autoscaler import AutoscalerSummary
from ray.autoscaler._private.load_metrics import LoadMetricsSummary
from ray.autoscaler._private.util import format_info_string
from ray.autoscaler.v2.schema import Stats
from ray.autoscaler.v2.utils import ClusterStatusFormatter, ClusterStatusParser
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeState, NodeStatus

from g2rpo_ray.cluster import connect, demand, placement
from g2rpo_ray.cluster.connect import ray_cluster, worker_environment
from g2rpo_ray.cluster.demand import (
    ClusterError,
    Demand,
    Node,
    evaluation_demand,
    living_nodes,
    selects,
    shortage,
)
from g2rpo_ray.cluster.placement import placed, wait_for_nodes
from g2rpo_ray.common.section import ConfigError
from tests.tiny import tiny_config

H100, L40 = {"ray.io/accelerator-type": "H100"}, {"ray.io/accelerator-type": "L40"}


def node(name: str, cpus: float, gpus: float, labels: dict[str, str] | None = None) -> Node:
    amounts = {"CPU": cpus, "GPU": gpus}
    return Node(name, f"10.0.0.{name}", labels or {}, amounts, dict(amounts))


def workers(count: int, cpus: float, gpus: float, **labels: str) -> Demand:
    selector = {f"ray.io/{key}": value for key, value in labels.items()}
    return Demand("rollout.workers", count, {"CPU": cpus, "GPU": gpus}, selector)


def ranks(count: int, cpus: float, gpus: float) -> Demand:
    return Demand("learner.ranks", count, {"CPU": cpus, "GPU": gpus})


def test_what_fits_has_no_shortage() -> None:
    nodes = [node("1", 8, 2), node("2", 8, 2)]
    assert shortage([workers(2, 1, 1), ranks(2, 1, 1)], nodes) == []


@pytest.mark.parametrize(
    ("demands", "nodes", "named"),
    [
        ([workers(4, 1, 1), ranks(2, 1, 1)], [node("1", 8, 4)],
         ["wants 6 GPU and the cluster has 4", "rollout.workers=4 asks for 4",
          "learner.ranks=2 asks for 2", "gpus_per_..."]),
        ([workers(2, 1, 1), ranks(2, 1, 0)], [node("1", 8, 1)],
         ["wants 2 GPU and the cluster has 1: rollout.workers=2 asks for 2. "]),
        ([workers(2, 8, 1)], [node("1", 8, 4)],
         ["wants 16 CPU and the cluster has 8", "cpus_per_..."]),
        ([workers(1, 12, 1)], [node("1", 8, 1), node("2", 8, 1)],
         ["one process asks for 12 CPU, 1 GPU on one node", "10.0.0.1 8 CPU, 1 GPU"]),
        ([workers(1, 1, 1, **{"accelerator-type": "H200"})], [node("1", 8, 1, H100)],
         ["rollout.label_selector {'ray.io/accelerator-type': 'H200'} fits no node",
          "labels in the cluster: ray.io/accelerator-type=H100", "ray start --labels"]),
        ([workers(3, 1, 0.6)], [node("1", 8, 2)],
         ["no node has room for 1 of rollout.workers", "10.0.0.1 8 CPU, 2 GPU"]),
        ([workers(2, 5, 0)], [node("1", 8, 0), node("2", 4, 0)],
         ["no node has room for 1 of rollout.workers", "10.0.0.2 4 CPU"]),
        ([workers(2, 1, 1, **{"accelerator-type": "H100"})],
         [node("1", 8, 1, H100), node("2", 8, 1, L40)],
         ["no node has room for 1 of rollout.workers"]),
    ],
)  # fmt: skip
def test_a_shortage_names_setting_amounts_and_remedy(
    demands: list[Demand], nodes: list[Node], named: list[str]
) -> None:
    (reason,) = shortage(demands, nodes)
    assert "asks for 0" not in reason
    for part in named:
        assert part in reason


def test_evaluation_workers_go_where_rollout_workers_go(tmp_path: Path) -> None:
    settings = ["evaluation.workers=1", "evaluation.every=1", "rollout.label_selector={zone: a}"]
    (demand,) = evaluation_demand(tiny_config(tmp_path, *settings))
    (reason,) = shortage([demand], [node("1", 8, 0)])
    assert reason.startswith("rollout.label_selector {'zone': 'a'} fits no node")


def test_free_resources_are_another_question_than_all() -> None:
    busy = node("1", 8, 2)
    busy.free["GPU"] = 0.0
    assert shortage([workers(1, 1, 1)], [busy]) == []
    assert "has 0 free" in shortage([workers(1, 1, 1)], [busy], "free")[0]


@pytest.mark.parametrize(
    ("condition", "meant"),
    [("H100", True), ("L40", False), ("!L40", True), ("!H100", False), ("in(H100, A100)", True),
     ("in(L40,A100)", False), ("!in(L40, A100)", True)],
)  # fmt: skip
def test_label_conditions_follow_ray(condition: str, meant: bool) -> None:
    assert selects({"ray.io/accelerator-type": condition}, H100) is meant


def test_workers_get_only_what_the_list_lets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "hf_private")
    passed = worker_environment(["NCCL_*", "ABSENT"])
    assert passed["NCCL_DEBUG"] == "WARN"
    assert passed.keys() - {"NCCL_DEBUG"} == connect.WORKER_ENVIRONMENT.keys() | {
        name for name in passed if name.startswith("NCCL_")
    } - {"NCCL_DEBUG"}
    # What a user's own shell says of hidden cards is no setting of the run.
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    assert worker_environment(["RAY_ACCEL*"])["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "1"
    with pytest.raises(
        ClusterError, match=r"HF_TOKEN through, which looks like a secret"
    ) as caught:
        worker_environment(["HF_*"])
    assert "hf_private" not in str(caught.value)


def test_the_whole_environment_is_no_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.environment.*would pass on everything"):
        tiny_config(tmp_path, "cluster.environment=['*']")


BY_HAND = "ab" * 28
"""A node's id, after which Ray names a node that nobody gave a type."""


def status_1(node_type: str) -> str:
    """``ray status`` of one node under version 1 of the autoscaler, in Ray's own words."""
    load = LoadMetricsSummary({"CPU": (0, 1)}, [], [], [], [])
    nodes = AutoscalerSummary({node_type or f"node_{BY_HAND}": 1}, {}, [], {}, [])
    return str(format_info_string(load, nodes, time=datetime.now()))


def status_2(node_type: str, state: int = NodeStatus.RUNNING) -> str:
    """The same under version 2."""
    reply, node_id = GetClusterStatusReply(), bytes.fromhex(BY_HAND)
    reply.cluster_resource_state.node_states.append(
        NodeState(node_id=node_id, ray_node_type_name=node_type, status=state)
    )
    stats = Stats(gcs_request_time_s=0.0, request_ts_s=0.0)
    parsed = ClusterStatusParser.from_get_cluster_status_reply(reply, stats)
    return str(ClusterStatusFormatter.format(parsed))


@pytest.mark.parametrize("node_type", ["", "ray.head.default", "node_group"])
@pytest.mark.parametrize(
    "status",
    [status_1, status_2, lambda kind: status_2(kind, NodeStatus.IDLE)],
    ids=["1", "2", "2 idle"],
)
def test_nodes_of_an_autoscaler_are_told_from_those_started_by_hand(
    status: Callable[[str], str], node_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = status(node_type)
    assert (node_type or BY_HAND) in text
    monkeypatch.setattr(demand, "_ray_status", lambda: text)
    assert demand.has_autoscaler() is bool(node_type)


@pytest.mark.usefixtures("ray_cluster")
def test_a_private_ray_has_no_autoscaler() -> None:
    assert not demand.has_autoscaler()


@pytest.mark.usefixtures("ray_cluster")
def test_waiting_is_said_and_ends_with_a_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(placement, "WAIT_LINE_S", 0.1)
    monkeypatch.setattr(placement, "POLL_S", 0.1)
    lines: list[str] = []
    reward = Demand("rewards.clip.min_replicas", 1, {"CPU": 0.5})
    too_many = Demand("rollout.workers", 9, {"CPU": 1.0})
    with (
        pytest.raises(ClusterError) as caught,
        placed([too_many], [reward], timeout_s=2, tell=lines.append),
    ):
        pytest.fail("there is no room for 9 CPUs")
    assert len(lines) >= 2
    assert all(
        re.match(r"waiting for room, \d of 2 s: wanted 9.5 CPU, 0 GPU; the cluster has 8 CPU", line)
        for line in lines
    )
    message = str(caught.value)
    assert "no room for the run within 2 s (cluster.start_timeout_s)" in message
    assert "wants 9.5 CPU and the cluster has 8: rollout.workers=9 asks for 9" in message


@pytest.mark.usefixtures("ray_cluster")
def test_a_busy_cluster_is_told_from_a_small_one() -> None:
    big = Demand("rollout.workers", 1, {"CPU": 6.0})
    with placed([big], [], timeout_s=120, tell=lambda _: None):
        with (
            pytest.raises(ClusterError, match=r"Others use the cluster.*ray status") as caught,
            placed([big], [], timeout_s=1, tell=lambda _: None),
        ):
            pytest.fail("6 of 8 CPUs are taken")
        assert "wants 6 CPU and the cluster has 2 free" in str(caught.value)
    # The room of both is given back.
    with placed([big], [], timeout_s=120, tell=lambda _: None):
        pass


@pytest.mark.usefixtures("ray_cluster")
def test_a_label_that_nobody_has(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "rollout.label_selector={ray.io/accelerator-type: H200}")
    with (
        pytest.raises(ClusterError, match=r"rollout.label_selector .* fits no node"),
        placed([demand.rollout_demand(config)], [], timeout_s=1, tell=lambda _: None),
    ):
        pytest.fail("no node has that label")


@pytest.mark.usefixtures("ray_cluster")
def test_nodes_that_never_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "FIRST_LINE_S", 0.0)
    lines: list[str] = []
    config = tiny_config(tmp_path, "cluster.min_nodes=2", "cluster.start_timeout_s=2")
    (here,) = living_nodes()
    with pytest.raises(ClusterError, match=r"has not 2 nodes .*, only " + re.escape(here.address)):
        wait_for_nodes(config, lines.append)
    assert lines
    assert re.match(r"waiting for nodes, \d of 2 s", lines[0])


def test_a_head_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "HEAD_TRIES", 1)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(ClusterError, match=r"nobody answers at '127.0.0.1:1'.*refused.*ray status"),
        ray_cluster(tiny_config(tmp_path).cluster),
    ):
        pytest.fail("nobody is there")


def test_a_client_address_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"Ray Client address.*ray job submit"),
        ray_cluster(tiny_config(tmp_path, "cluster.address=ray://head:10001").cluster),
    ):
        pytest.fail("connected")
