"""A Ray cluster that its own autoscaler makes larger and smaller, all of it on this machine.

As ``ray.cluster_utils.AutoscalingCluster``, which lacks a file in Ray's wheel and begins with ``ray
stop --force``: that would end every other cluster here.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FakeMultiNodeProvider,
)
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated.autoscaler_pb2 import ClusterResourceState, NodeStatus

from tests.cluster.raylets import end_tree
from tests.cluster.slurm import free_ports
from tests.integration.command import ROOT, wait_until

NO_COMMANDS = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files",
)  # fmt: skip
"""What the autoscaler would run on a node by ssh."""
IDLE_NODE_S = 6.0
"""A node that has nothing to do for so long goes."""


class Provider(FakeMultiNodeProvider):
    """Nodes as raylets of this machine; those of a type ``never ...`` are ordered in vain."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: dict[str, str], *rest: Any
    ) -> None:
        if not tags[TAG_RAY_USER_NODE_TYPE].startswith("never"):
            super().create_node_with_resources_and_labels(node_config, tags, *rest)


@dataclass(frozen=True)
class Autoscaled:
    """A head, and the nodes that the autoscaler adds to it as raylets of this machine."""

    version: int
    folder: Path
    port: int
    head: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def state(self) -> ClusterResourceState:
        """What the autoscaler is asked for, and the nodes, as the head knows them."""
        return get_cluster_resource_state(GcsClient(address=self.address))

    def nodes(self) -> int:
        """Nodes that are alive, the head included."""
        return sum(node.status != NodeStatus.DEAD for node in self.state().node_states)

    def asked_for(self) -> list[str]:
        """What is still wanted from the autoscaler, in its own words."""
        state = self.state()
        left = [
            *state.pending_resource_requests,
            *state.pending_gang_resource_requests,
            *state.cluster_resource_constraints,
        ]
        # Ray Data leaves a constraint behind that asks for nothing.
        return [text for request in left if (text := str(request))]

    def processes(self, title: str) -> list[psutil.Process]:
        """Of the cluster, by the beginning of their title."""
        family = psutil.Process(self.head.pid).children(recursive=True)
        return [process for process in family if " ".join(_command(process)).startswith(title)]

    def nodes_with(self, title: str) -> list[psutil.Process]:
        """Raylets below which such a process runs."""
        above = [parent for process in self.processes(title) for parent in process.parents()]
        return [parent for parent in above if parent.name() == "raylet"]

    def logs(self) -> str:
        """The end of what the autoscaler has written."""
        found = self.folder.glob("ray/session_latest/logs/monitor.*")
        return "\n".join(path.read_text()[-4000:] for path in found)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextmanager
def autoscaled(
    version: int, cpus: float, types: dict[str, dict[str, Any]], order_timeout_s: int = 600
) -> Iterator[Autoscaled]:
    """Start a head of so many CPUs with an autoscaler, and end it and all that was added.

    Args:
        version: of the autoscaler, 1 or 2.
        types: name -> resources, labels, max_workers of a type of nodes.
        order_timeout_s: after so long version 2 gives an order up, and may order another type.
            Ray's own is 600, four times over.
    """
    # Not pytest's folder: Ray's sockets lie in it, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="g2rpo-ray-"))
    (port,) = free_ports(1)
    settings = folder / "autoscaler.json"
    settings.write_text(json.dumps(_settings(port, cpus, types)))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_NODE_TYPE_NAME": "ray.head.default",
        "RAY_enable_autoscaler_v2": str(int(version == 2)),
        "RAY_AUTOSCALER_RECONCILE_REQUEST_STATUS_TIMEOUT_S": str(order_timeout_s),
        "RAY_AUTOSCALER_RECONCILE_MAX_NUM_RETRY_REQUEST_TO_ALLOCATE": "0",
    }
    log = folder / "ray_start.log"
    with log.open("wb") as output:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
             f"--autoscaling-config={settings}", f"--port={port}", f"--temp-dir={folder}/ray",
             "--disable-usage-stats", "--include-dashboard=false", f"--num-cpus={cpus:g}",
             "--num-gpus=0", "--object-store-memory=200000000", "--min-worker-port=0",
             "--max-worker-port=0", "--dashboard-agent-listen-port=0",
             f"--ray-client-server-port={port + 2}"],
            env=kept | environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(
            lambda: b"Ray runtime started" in log.read_bytes() or head.poll() is not None,
            "ray start",
            120,
        )
        assert head.poll() is None, log.read_text()
        yield Autoscaled(version, folder, port, head)
    finally:
        end_tree(head)
        shutil.rmtree(folder, ignore_errors=True)


def _settings(port: int, cpus: float, types: dict[str, dict[str, Any]]) -> dict[str, Any]:
    head = {"resources": {"CPU": cpus}, "node_config": {}, "max_workers": 0}
    added = {name: {"node_config": {}, "min_workers": 0} | kind for name, kind in types.items()}
    return {
        "cluster_name": "fake",
        "max_workers": 8,
        "provider": {
            # Not fake_multinode: its defaults are a file that Ray's wheel lacks.
            "type": "external",
            "module": f"{__name__}.{Provider.__name__}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": f"127.0.0.1:{port}",
        },
        "available_node_types": {"ray.head.default": head} | added,
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_NODE_S / 60,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        **{name: [] for name in NO_COMMANDS},
    }
