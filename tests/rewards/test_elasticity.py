"""Reward servers under load: replicas come and go, and one that dies costs no score."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from ray import serve

from g2rpo_ray.rewards.client import RewardClient
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.rewards.server import reward_servers

PICTURES = torch.full((4, 8, 8, 3), 255, dtype=torch.uint8)
APP, MOST = "elastic-mine", 3


@pytest.fixture(scope="module")
def client(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardClient]:  # noqa: ARG001
    log = tmp_path_factory.mktemp("elastic") / "calls.log"
    log.touch()
    reward = RewardSection(
        kind="python",
        options={"target": "tests.rewards.fakes:ObedientScorer", "options": {"log": str(log)}},
        cpus_per_replica=0.1,
        max_replicas=MOST,
        requests_per_replica=1.0,
        upscale_delay_s=0.5,
        downscale_delay_s=1.0,
        retries=0,
        timeout_s=120.0,
    )
    rewards = {"mine": reward}
    with reward_servers("elastic", rewards, 360, private_cluster=False) as handles:
        yield RewardClient(handles, rewards, stop_on_invalid=True)


def replicas() -> int:
    deployment = serve.status().applications[APP].deployments["mine"]
    return deployment.replica_states.get("RUNNING", 0)


def score(client: RewardClient, prompt: str, count: int) -> None:
    sent = [client.submit(0, f"{prompt} {number}", PICTURES, ["mine"]) for number in range(count)]
    for pending in sent:
        assert torch.allclose(pending.result()["mine"], torch.ones(4))


def score_until(client: RewardClient, done: threading.Event) -> None:
    """More requests at a time than there may be replicas, again and again."""
    while not done.is_set():
        score(client, "hang", MOST + 1)


def test_replicas_follow_the_load(client: RewardClient) -> None:
    started_s = time.monotonic()
    seen: list[tuple[float, int]] = []
    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(score_until, client, enough)
        while (not load.done() or replicas() > 1) and time.monotonic() < started_s + 450:
            if not seen or seen[-1][1] != replicas():
                seen.append((round(time.monotonic() - started_s, 1), replicas()))
            if replicas() > 1:
                enough.set()
            time.sleep(0.2)
        enough.set()
    load.result()
    seen.append((round(time.monotonic() - started_s, 1), replicas()))
    print("replicas over time (s, replicas):", seen)
    counts = [count for _, count in seen]
    assert counts[0] == 1
    assert 1 < max(counts) <= MOST
    assert counts[-1] == 1


def replica_processes() -> list[psutil.Process]:
    """Of this application, among all on the machine."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"ray::ServeReplica:{APP}:mine" in " ".join(process.info["cmdline"] or ())
    ]


def test_a_replica_that_dies_costs_no_score(client: RewardClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(score, client, "hang again", 2)
        time.sleep(0.5)
        victims = replica_processes()
        assert victims
        os.kill(victims[0].pid, signal.SIGKILL)
    load.result()
    pending = client.submit(0, "well again", PICTURES, ["mine"])
    assert torch.allclose(pending.result()["mine"], torch.ones(4))


@pytest.mark.long
def test_a_replica_whose_scorer_hangs_is_replaced(ray_cluster: None, tmp_path: Path) -> None:  # noqa: ARG001
    log = tmp_path / "calls.log"
    log.touch()
    reward = RewardSection(
        kind="python",
        options={"target": "tests.rewards.fakes:ObedientScorer", "options": {"log": str(log)}},
        cpus_per_replica=0.1,
        # Far longer than the scorer takes, far shorter than it hangs, and than Serve's own probe.
        timeout_s=5.0,
        retries=20,
        health_timeout_s=6.0,
    )
    with reward_servers("stuck", {"mine": reward}, 360, private_cluster=False) as handles:
        client = RewardClient(handles, {"mine": reward}, stop_on_invalid=True)
        started_s = time.monotonic()
        score(client, "stick once", 1)
        print(f"the replica was replaced after {time.monotonic() - started_s:.1f} s")
