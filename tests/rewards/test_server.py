"""Rewards through real Ray Serve deployments: a failed score is retried, named, and never a 0."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray._private.state import actors
from torch import Tensor

from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards import client as client_module
from g2rpo_ray.rewards import server as server_module
from g2rpo_ray.rewards.client import FIRST_PAUSE_S, InvalidRewardError, RewardClient, SentRequests
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.rewards.server import reward_servers, wait_for_servers
from tests.integration.command import wait_until

PICTURES = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 8, 8, 3) * 60
BRIGHTNESS = torch.tensor([0.0, 60.0, 120.0, 180.0]) / 255
"""What the scorer gives when nothing is wrong."""
RETRIES = 1
BESIDE = {"beside": "single", "cpus_per_replica": 1.0, "batch_size": 2}
CHOOSY: dict[str, Any] = {
    "kind": "python",
    "options": {"target": "tests.rewards.fakes:ChoosyScorer"},
}


@dataclass(frozen=True)
class Servers:
    """Two deployments of the obedient scorer, and the lines that they write; one that compares,
    and two beside the first."""

    client: RewardClient
    logs: dict[str, Path]

    def score(self, prompt: str, reward: str = "single") -> Tensor:
        return self.client.submit(7, prompt, PICTURES, [reward]).result()[reward]

    def calls(self, prompt: str, reward: str = "single") -> int:
        lines = self.logs[reward].read_text().splitlines()
        return sum(prompt in line.split("\t") for line in lines)

    def with_settings(self, *, stop_on_invalid: bool = True, **changes: float) -> "Servers":
        """The same servers, seen by a client with other settings."""
        rewards = {
            name: reward.model_copy(update=changes) for name, reward in self.client.rewards.items()
        }
        return Servers(RewardClient(self.client.handles, rewards, stop_on_invalid), self.logs)


def obedient(log: Path, merge_requests: int) -> RewardSection:
    return RewardSection(
        kind="python",
        options={"target": "tests.rewards.fakes:ObedientScorer", "options": {"log": str(log)}},
        cpus_per_replica=0.1,
        batch_size=3,
        merge_requests=merge_requests,
        retries=RETRIES,
        timeout_s=60.0,
    )


@pytest.fixture(scope="module")
def servers(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:  # noqa: ARG001
    folder = tmp_path_factory.mktemp("rewards")
    logs = {name: folder / f"{name}.log" for name in ("single", "merging", "beside")}
    for log in logs.values():
        log.touch()
    rewards = {
        "single": obedient(logs["single"], merge_requests=1),
        "merging": obedient(logs["merging"], merge_requests=4),
        "comparing": RewardSection(
            kind="python",
            options={"target": "tests.rewards.fakes:CountingScorer"},
            cpus_per_replica=0.1,
            batch_size=3,
            merge_requests=4,
        ),
        "beside": RewardSection(**obedient(logs["beside"], 1).model_dump() | BESIDE),
        "choosy": RewardSection.model_validate(CHOOSY | BESIDE),
    }
    with reward_servers("test", rewards, start_timeout_s=360, private_cluster=False) as handles:
        yield Servers(RewardClient(handles, rewards, stop_on_invalid=True), logs)


def test_scores_come_back_in_the_order_of_pictures(servers: Servers) -> None:
    assert torch.allclose(servers.score("good"), BRIGHTNESS)


def test_a_reward_beside_another_is_scored_by_its_replica_in_its_own_way(servers: Servers) -> None:
    both = servers.client.submit(7, "good for two", PICTURES, ["single", "beside"])
    scores = both.result()
    assert torch.allclose(scores["single"], BRIGHTNESS)
    assert torch.allclose(scores["beside"], BRIGHTNESS)
    assert len(both.busy_s) == 1
    lines = {name: servers.logs[name].read_text().splitlines() for name in ("single", "beside")}
    assert [line for line in lines["single"] if "for two" in line] == [
        "3\tgood for two", "1\tgood for two",
    ]  # fmt: skip
    assert [line for line in lines["beside"] if "for two" in line] == ["2\tgood for two"] * 2
    # The pictures travelled once.
    assert both.sent["single"] is both.sent["beside"]


def test_rewards_that_were_asked_together_are_asked_again_alone(servers: Servers) -> None:
    both = servers.with_settings(stop_on_invalid=False).client.submit(
        7, "raise for two", PICTURES, ["beside", "single", "merging"]
    )
    scores = both.result()
    assert list(scores) == ["beside", "single", "merging"]
    assert all(values.isnan().all() for values in scores.values())
    assert {name: servers.calls("raise for two", name) for name in scores} == dict.fromkeys(
        scores, RETRIES + 1
    )
    assert len(both.failures) == len(scores)


def test_metadata_go_with_the_prompt(servers: Servers) -> None:
    for level in (3.0, 4.0):
        scores = servers.score(PromptText("metadata", {"levels": [level]}))
        assert scores.tolist() == [level] * len(PICTURES)


def test_a_batch_is_cut_inside_a_request(servers: Servers) -> None:
    servers.score("good cut")
    lines = servers.logs["single"].read_text().splitlines()
    assert [line for line in lines if "good cut" in line] == ["3\tgood cut", "1\tgood cut"]


def test_any_float_type_becomes_float32(servers: Servers) -> None:
    scores = servers.score("double")
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, BRIGHTNESS)


@pytest.mark.parametrize(
    ("wish", "batches", "cause"),
    [
        ("raise", 1, "ZeroDivisionError: the scorer's own bug"),
        ("nan", 2, "2 of 4 scores are NaN or infinite"),
        ("infinite", 2, "2 of 4 scores are NaN or infinite"),
        ("few", 1, "returned shape (2,) for 3 pictures; expected (3,)"),
        ("shape", 1, "returned shape (3, 1) for 3 pictures; expected (3,)"),
        ("type", 1, "returned list; expected a float32 tensor"),
    ],
)
def test_a_bad_answer_is_retried_and_then_stops_with_its_names(
    servers: Servers, wish: str, batches: int, cause: str
) -> None:
    prompt = f"{wish} and stop"
    with pytest.raises(InvalidRewardError) as caught:
        servers.score(prompt)
    message = str(caught.value)
    assert f"reward 'single' has no usable score for prompt 7 ('{prompt}')" in message
    assert f"after {RETRIES + 1} tries" in message
    assert cause in message
    assert servers.calls(prompt) == batches * (RETRIES + 1)


@pytest.mark.parametrize("wish", ["raise", "nan", "few", "type"])
def test_a_bad_answer_is_nan_with_its_words_where_the_run_goes_on(
    servers: Servers, wish: str
) -> None:
    pending = servers.with_settings(stop_on_invalid=False).client.submit(
        7, f"{wish} and go on", PICTURES, ["single"]
    )
    assert pending.failures == []
    scores = pending.result()["single"]
    assert scores.isnan().all()
    assert scores.shape == (4,)
    assert len(pending.failures) == 1
    assert f"'{wish} and go on'" in pending.failures[0]


def test_one_failed_reward_leaves_the_other_its_scores(servers: Servers) -> None:
    client = servers.with_settings(stop_on_invalid=False).client
    pending = client.submit(7, "good for both", PICTURES, ["merging", "single"])
    assert all(torch.allclose(scores, BRIGHTNESS) for scores in pending.result().values())
    assert pending.failures == []


def test_a_failed_reward_that_is_not_required_does_not_stop_the_run(servers: Servers) -> None:
    optional = servers.with_settings(required=False).client
    pending = optional.submit(7, "raise but optional", PICTURES, ["single"])
    assert pending.result()["single"].isnan().all()
    assert "prompt 7 ('raise but optional')" in pending.failures[0]
    waited_s = pending.measured["single"].pop("wait_s")
    # The pause between its tries counts.
    assert FIRST_PAUSE_S <= waited_s < 60
    assert pending.measured == {"single": {"failures": RETRIES + 1}}


def test_what_a_request_took_is_measured(servers: Servers) -> None:
    pending = servers.client.submit(7, "good and measured", PICTURES, ["single"])
    pending.result()
    measured = pending.measured["single"]
    # 4 pictures in two passes of at most 3.
    assert measured["batch_fill"] == pytest.approx(4 / 6)
    assert measured["failures"] == 0
    assert 0 < measured["latency_s"] < 60


def test_a_replica_says_how_long_it_has_worked_failed_requests_included(servers: Servers) -> None:
    def busy_s(prompt: str) -> dict[str, float]:
        pending = servers.client.submit(7, prompt, PICTURES, ["single"])
        pending.result()
        return pending.busy_s

    (replica, first_s), *others = busy_s("good at first").items()
    assert others == []
    with pytest.raises(InvalidRewardError):
        # Every try takes 0.2 s, and no answer tells of it.
        servers.score("late")
    assert busy_s("good at last")[replica] - first_s > 0.2 * (RETRIES + 1)
    assert servers.client.replicas() == dict.fromkeys(servers.client.rewards, 1)


@pytest.mark.parametrize(
    ("pictures", "cause"),
    [
        (PICTURES[:0], "pictures are empty: shape [0, 8, 8, 3]"),
        (PICTURES[:, :0], "pictures are empty: shape [4, 0, 8, 3]"),
        (PICTURES / 255, "pictures are float32; expected uint8 [B, H, W, 3]"),
        (torch.full((1, 8, 8, 3), torch.nan), "pictures are float32, 192 values NaN or infinite"),
        (PICTURES[..., 0], "pictures have shape [4, 8, 8]"),
        (PICTURES[..., :1], "pictures have shape [4, 8, 8, 1]"),
        (torch.zeros(4, 8, 8, 4, dtype=torch.uint8), "pictures have shape [4, 8, 8, 4]"),
    ],
    ids=["none", "no rows", "float", "nan", "grey-scale", "one channel", "RGBA"],
)
def test_pictures_that_are_none_are_refused_with_their_names(
    servers: Servers, pictures: Tensor, cause: str
) -> None:
    client = servers.with_settings(retries=0).client
    with pytest.raises(InvalidRewardError) as caught:
        client.submit(7, "odd pictures", pictures, ["single"]).result()
    assert "reward 'single' has no usable score for prompt 7 ('odd pictures')" in str(caught.value)
    assert cause in str(caught.value)


def test_a_failure_that_passes_is_mended_by_the_retry(servers: Servers) -> None:
    pending = servers.client.submit(7, "once is no custom", PICTURES, ["single"])
    assert torch.allclose(pending.result()["single"], BRIGHTNESS)
    assert pending.measured["single"]["failures"] == 1
    # The first batch failed, then both were scored.
    assert servers.calls("once is no custom") == 3


def test_no_retries_when_none_are_configured(servers: Servers) -> None:
    with pytest.raises(InvalidRewardError, match="after 1 tries"):
        servers.with_settings(retries=0).score("raise without retry")
    assert servers.calls("raise without retry") == 1


@pytest.mark.parametrize(
    "prompts",
    [
        ["good a", "raise b", "good c", "few d", "good e", "nan f", "good g", "type h"],
        # Passes of three pictures are cut inside requests, and NaN comes for the first of a pass.
        ["good i", "nan j", "good k", "nan l"],
    ],
    ids=["all kinds", "only NaN"],
)
def test_good_requests_that_meet_a_bad_one_keep_their_scores(
    servers: Servers, prompts: list[str]
) -> None:
    client = servers.with_settings(stop_on_invalid=False, retries=0).client
    with held(servers, "merging"):
        submitted = submit_all(client, [(prompt, PICTURES) for prompt in prompts])
    results = [pending.result()["merging"] for pending in submitted]
    for prompt, scores in zip(prompts, results, strict=True):
        if prompt.startswith("good"):
            assert torch.allclose(scores, BRIGHTNESS), prompt
        else:
            assert scores.isnan().all(), prompt
    met = [line.split("\t")[1:] for line in servers.logs["merging"].read_text().splitlines()]
    assert any(len(set(prompts) & set(line)) > 1 for line in met), "no two requests met"


def test_requests_of_other_picture_sizes_do_not_fail_each_other(servers: Servers) -> None:
    sizes = [PICTURES, PICTURES[:, :4], PICTURES.repeat_interleave(2, dim=2)]
    prompts = [f"good size {number}" for number in range(len(sizes))]
    with held(servers, "merging"):
        submitted = submit_all(servers.client, zip(prompts, sizes, strict=True))
    for pending in submitted:
        assert torch.allclose(pending.result()["merging"], BRIGHTNESS)
        assert pending.measured["merging"]["failures"] == 0


def test_a_scorer_that_compares_pictures_gets_each_request_whole_and_alone(
    servers: Servers,
) -> None:
    submitted = [servers.client.submit(7, "same", PICTURES, ["comparing"]) for _ in range(4)]
    assert [pending.result()["comparing"].tolist() for pending in submitted] == [[4.0] * 4] * 4


def test_no_answer_in_time_is_named_with_the_setting_and_costs_the_scorer_nothing_more(
    servers: Servers,
) -> None:
    with held(servers):
        with pytest.raises(InvalidRewardError) as caught:
            servers.with_settings(timeout_s=0.3, retries=0).score("good but given up")
        assert "no answer within 0.3 s (rewards.single.timeout_s)" in str(caught.value)
        wait_until(lambda: requests_with("single") == 1, "the replica to hear of it")
    servers.score("good after that")
    assert servers.calls("good but given up") == 0


class Asker:
    """An actor that asks for scores and never fetches them."""

    def ask(self, client: RewardClient, prompts: list[str]) -> None:
        self.sent = [client.submit(7, prompt, PICTURES, ["single"]) for prompt in prompts]


def test_requests_of_an_actor_that_has_ended_are_not_scored(servers: Servers) -> None:
    asker = ray.remote(num_cpus=0.1)(Asker).remote()
    release = servers.logs["single"].with_name("release")
    release.unlink(missing_ok=True)
    ray.get(asker.ask.remote(servers.client, ["hold for one that ends", "good but orphaned"]))
    wait_for_call(servers, "hold for one that ends")
    wait_until(lambda: requests_with("single") == 2, "the second to come, too")
    ray.kill(asker)
    wait_until(lambda: actors(asker._actor_id.hex())["State"] == "DEAD", "the asker's end")
    wait_until(lambda: requests_with("single") < 2, "the replica to hear of it")
    release.touch()
    servers.score("good after the orphans")
    assert servers.calls("good but orphaned") == 0


def test_an_answer_that_was_there_in_time_may_be_fetched_late(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = servers.with_settings(timeout_s=60.0, retries=0).client.submit(
        7, "good but late", PICTURES, ["single"]
    )
    wait_for_call(servers, "good but late", calls=2)
    pending.sent["single"].result(timeout_s=60)
    later_s = time.monotonic() + 61
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: later_s))
    assert torch.allclose(pending.result()["single"], BRIGHTNESS)


@contextmanager
def held(servers: Servers, reward: str = "single") -> Iterator[None]:
    """Its replica is at work meanwhile, so that requests meet."""
    release = servers.logs[reward].with_name("release")
    release.unlink(missing_ok=True)
    before = servers.calls("hold it", reward)
    first = servers.client.submit(7, "hold it", PICTURES, [reward])
    wait_for_call(servers, "hold it", reward, before + 1)
    try:
        yield
    finally:
        release.touch()
    first.result()


def requests_with(reward: str) -> int:
    """How many its replicas have, at work or waiting."""
    named = ray.util.list_named_actors(all_namespaces=True)
    replicas = [
        ray.get_actor(actor["name"], actor["namespace"])
        for actor in named
        if actor["name"].startswith(f"SERVE_REPLICA::test-{reward}#")
    ]
    return sum(ray.get([replica.get_num_ongoing_requests.remote() for replica in replicas]))


def submit_all(client: RewardClient, requests: Iterable[tuple[str, Tensor]]) -> list[SentRequests]:
    """Send them to the merging scorer, and wait until they are all with its replica."""
    submitted = [client.submit(7, prompt, pictures, ["merging"]) for prompt, pictures in requests]
    for pending in submitted:
        pending.sent["merging"]._to_object_ref_sync()
    return submitted


def wait_for_call(servers: Servers, prompt: str, reward: str = "single", calls: int = 1) -> None:
    wait_until(lambda: servers.calls(prompt, reward) >= calls, prompt)


def test_a_scorer_that_does_not_start_is_named_with_the_cause(servers: Servers) -> None:  # noqa: ARG001
    target = "tests.rewards.fakes:NoScorer"
    broken = RewardSection(kind="python", options={"target": target}, cpus_per_replica=0.1)
    with pytest.raises(ScorerError) as caught:  # noqa: SIM117
        with reward_servers("broken", {"mine": broken}, 360, private_cluster=False):
            pytest.fail("the servers were yielded")
    assert "reward 'mine' did not start" in str(caught.value)
    assert f"python scorer '{target}' is no subclass" in str(caught.value)


TRIES = 2
"""Fewer than there are: each takes seconds."""


@pytest.mark.parametrize("deaths", [1, TRIES])
def test_a_replica_that_is_lost_while_it_starts_is_started_anew(
    servers: Servers,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deaths: int,
) -> None:
    """As where Ray places it on a node whose death it has not noticed."""
    monkeypatch.setattr(server_module, "START_TRIES", TRIES)
    log = tmp_path / "starts"
    options = {
        "target": "tests.rewards.fakes:DyingScorer",
        "options": {"log": str(log), "deaths": deaths},
    }
    rewards = {"mine": RewardSection(kind="python", options=options, cpus_per_replica=0.1)}
    lost = pytest.raises(ScorerError, match="'mine' was lost 2 times while it started")
    with lost if deaths == TRIES else nullcontext():  # noqa: SIM117
        with reward_servers(f"dying{deaths}", rewards, 360, private_cluster=False) as handles:
            client = RewardClient(handles, rewards, stop_on_invalid=True)
            scores = client.submit(7, "good", PICTURES, ["mine"]).result()["mine"]
            assert torch.allclose(scores, BRIGHTNESS)
    assert len(log.read_text().splitlines()) == TRIES


def test_others_can_start_while_a_scorer_that_has_its_room_still_loads(
    servers: Servers,  # noqa: ARG001
    tmp_path: Path,
) -> None:
    """Small shares of a card come after large ones: that is a matter of room alone."""
    options = {
        "target": "tests.rewards.fakes:LateScorer",
        "options": {"file": str(tmp_path / "now")},
    }
    rewards = {"mine": RewardSection(kind="python", options=options, cpus_per_replica=0.1)}
    with reward_servers("late", rewards, 360, private_cluster=False, wait="room") as handles:
        states = [it["State"] for it in actors().values() if "::late-mine#" in it["Name"]]
        # A process that a busy machine lost at its start is replaced, and counted still.
        assert [state for state in states if state != "DEAD"] == ["ALIVE"]
        (tmp_path / "now").touch()
        wait_for_servers("late", rewards, 360)
        client = RewardClient(handles, rewards, stop_on_invalid=True)
        scores = client.submit(7, "good", PICTURES, ["mine"]).result()["mine"]
        assert torch.allclose(scores, BRIGHTNESS)


def test_taking_a_run_down_leaves_the_applications_of_others(servers: Servers) -> None:
    """Runs after others were taken down: the module's own servers still answer."""
    assert torch.allclose(servers.score("good at the end"), BRIGHTNESS)


def test_scorers_compute_the_same_bits_where_a_run_is_to(servers: Servers) -> None:
    assert servers.score("a cat", "choosy").tolist() == [0.0] * 4
    rewards = {"choosy": RewardSection.model_validate(CHOOSY | {"cpus_per_replica": 0.1})}
    with reward_servers("bits", rewards, 360, False, deterministic=True) as handles:
        client = RewardClient(handles, rewards, stop_on_invalid=True)
        scores = client.submit(0, "a cat", PICTURES, ["choosy"]).result()["choosy"]
        assert scores.tolist() == [1.0] * 4


def test_requests_share_no_pass_where_a_run_is_to_compute_the_same_bits(
    servers: Servers,  # noqa: ARG001  (its cluster)
    tmp_path: Path,
) -> None:
    (log := tmp_path / "merging.log").touch()
    rewards = {"merging": obedient(log, merge_requests=4)}
    with reward_servers("alone", rewards, 360, False, deterministic=True) as handles:
        alone = Servers(RewardClient(handles, rewards, stop_on_invalid=True), {"merging": log})
        with held(alone, "merging"):
            submitted = submit_all(alone.client, [(f"good {n}", PICTURES) for n in range(3)])
        for pending in submitted:
            assert torch.allclose(pending.result()["merging"], BRIGHTNESS)
    met = [set(line.split("\t")[1:]) for line in log.read_text().splitlines()]
    assert all(len(line) == 1 for line in met), met
