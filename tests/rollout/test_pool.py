"""RolloutPool over real actors without a model: what is lost is replaced, and nothing is wrong."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.rollout.actor import actor_class
from g2rpo_ray.rollout.crew import NODE_FAILURES, RolloutError, RolloutStartError
from g2rpo_ray.rollout.pool import POLL_S, RolloutPool
from g2rpo_ray.rollout.supply import SupplyError
from g2rpo_ray.weight_sync import Peer, WeightSyncError
from tests.integration.command import wait_until
from tests.rollout.stub_worker import StubWorker
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


Pools = Callable[..., RolloutPool]
HANGS = ("rollout.timeout_s=6", "rollout.min_deadline_s=3")
"""For what hangs alone: healthy workers may be slow, on a slow machine."""


def hire(_avoided: Sequence[str]) -> Any:
    return actor_class(StubWorker).options(num_cpus=0.25).remote()


@dataclass
class Shared:
    """A pool for many tests, since workers take seconds to start; each sees what is new."""

    pool: RolloutPool
    folder: Path
    told: list[str]
    asked: list[list[str]]
    """Nodes to avoid, for each worker that was hired."""
    lost_before: int = 0
    repeats_before: int = 0

    def ready(self) -> "Shared":
        """Whole again after the test before; counts and words start anew."""
        self.pool.wait_until_ready()
        self.told.clear()
        self.asked.clear()
        self.lost_before, self.repeats_before = self.pool.replacements, self.pool.repeats
        return self

    @property
    def replacements(self) -> int:
        return self.pool.replacements - self.lost_before

    @property
    def repeats(self) -> int:
        return self.pool.repeats - self.repeats_before


def shared(folder: Path, *overrides: str) -> Iterator[Shared]:
    told, asked = list[str](), list[list[str]]()

    def hire_and_note(avoided: Sequence[str]) -> Any:
        asked.append(list(avoided))
        return hire(avoided)

    config = tiny_config(folder / "run", "rollout.workers=2", *overrides)
    pool = RolloutPool(config, folder, told.append, hire=hire_and_note)  # type: ignore[arg-type]
    yield Shared(pool, folder, told, asked)
    pool.close()


@pytest.fixture(scope="module")
def patient_pool(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:  # noqa: ARG001
    yield from shared(tmp_path_factory.mktemp("patient"), "rollout.attempts=2")


@pytest.fixture(scope="module")
def lone_pool(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:  # noqa: ARG001
    yield from shared(tmp_path_factory.mktemp("lone"), "rollout.workers=1")


@pytest.fixture(scope="module")
def growing(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:  # noqa: ARG001
    """A pool of one to three."""
    settings = ("rollout.workers=1", "rollout.max_workers=3", "rollout.idle_timeout_s=1")
    yield from shared(tmp_path_factory.mktemp("growing"), *settings)


@pytest.fixture(scope="module")
def strict_pool(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:  # noqa: ARG001
    yield from shared(tmp_path_factory.mktemp("strict"), *HANGS)


@pytest.fixture
def patient(patient_pool: Shared) -> Shared:
    return patient_pool.ready()


@pytest.fixture
def strict(strict_pool: Shared) -> Shared:
    return strict_pool.ready()


@pytest.fixture
def lone(lone_pool: Shared) -> Shared:
    return lone_pool.ready()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def pools(tmp_path: Path, told: list[str]) -> Iterator[Pools]:
    made: list[RolloutPool] = []

    def make(*overrides: str, **options: Any) -> RolloutPool:
        config = tiny_config(tmp_path / "run", *overrides)
        options = {"hire": hire} | options
        made.append(RolloutPool(config, tmp_path, told.append, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def generate(pool: RolloutPool, *prompts: str) -> tuple[list[int], list[str]]:
    refs = [ray.put(prompt) for prompt in prompts]
    summaries, groups = pool.generate(refs, 3, lambda *_: None)
    return [summary.group_id for summary in summaries], ray.get(groups)


def expected(count: int) -> tuple[list[int], list[str]]:
    ids = [3 * count + slot for slot in range(count)]
    return ids, [f"group {number}" for number in ids]


def test_workers_that_wait_for_a_slow_scorer_are_not_replaced(
    strict: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g2rpo_ray.rollout.waits.WAIT_LINE_S", 5.0)

    def scored_when_asked_after(_done: int, _total: int) -> None:
        # They are asked when their time is over, and a line says whom they wait for.
        if strict.told:
            (strict.folder / "scored").touch()

    prompts = [ray.put("always scored")] * 2
    strict.pool.generate(prompts, 3, scored_when_asked_after)
    assert (strict.replacements, strict.repeats) == (0, 0)
    assert "waiting for reward 'judge', 6 s so far" in strict.told[0]


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("die", "died"),
        ("freeze", "not even what it does"),
        ("hang", "its own work takes"),
        ("raise", "ArithmeticError: a broken card"),
        ("nan", "BrokenLatentsError"),
        ("dropped", "gave 1 pictures whose latents are not finite"),
        ("other", "answered with group"),
        ("stale", "drew with weights -1, not 0"),
    ],
)
def test_a_worker_that_fails_is_replaced_and_its_group_drawn_elsewhere(
    request: pytest.FixtureRequest, wish: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g2rpo_ray.rollout.watchdog.PING_S", 5.0)
    two = request.getfixturevalue("strict" if wish in ("freeze", "hang") else "patient")
    assert generate(two.pool, "well", wish, "well", "well") == expected(4)
    assert (two.replacements, two.repeats) == (1, 1)
    assert said in " ".join(two.told)


def test_a_prompt_is_handed_out_with_its_embeddings(lone: Shared, tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    def encode(when: Path) -> str:
        while not when.exists():
            time.sleep(0.05)
        return "well"

    def encode_when_the_other_is_drawn(done: int, _total: int) -> None:
        if done == 1:
            (tmp_path / "now").touch()

    waited_s = lone.pool.encoder_wait_s
    # A worker that had the first would have to wait for it, and never draw the second.
    prompts = [encode.remote(tmp_path / "now"), ray.put("well")]
    lone.pool.generate(prompts, 3, encode_when_the_other_is_drawn)
    assert lone.replacements == 0
    assert lone.pool.encoder_wait_s > waited_s


def test_an_encoder_that_fails_costs_no_worker(patient: Shared) -> None:
    @ray.remote(num_cpus=0, max_retries=0)
    def encode() -> str:
        raise ZeroDivisionError("no tokens")

    with pytest.raises(SupplyError, match=r"prompt encoder.*ZeroDivisionError: no tokens"):
        patient.pool.generate([encode.remote()], 3, lambda *_: None)
    assert patient.replacements == 0


def test_an_encoder_that_hangs_is_named_and_costs_no_worker(strict: Shared) -> None:
    @ray.remote(num_cpus=0)
    def encode() -> str:
        time.sleep(3600)
        return ""

    hangs = encode.remote()
    with pytest.raises(SupplyError, match=r"1 of 2 prompts have no embeddings.*prompt encoder"):
        strict.pool.generate([ray.put("well"), hangs], 3, lambda *_: None)
    ray.cancel(hangs, force=True)
    assert strict.replacements == 0


def test_a_newcomer_gets_weights_while_the_learner_is_busy(pools: Pools, told: list[str]) -> None:
    pool = pools("rollout.workers=2")
    pool.wait_until_ready()
    pool.sync(send)

    def busy(_receivers: Sequence[Peer]) -> WeightReceipt:
        time.sleep(3600)
        raise AssertionError

    pool._crew._sync = busy
    assert generate(pool, "die", "well") == expected(2)
    deadline_s = time.monotonic() + pool._start_timeout_s
    while len(pool.workers) < 2:
        generate(pool, "slow")
        assert time.monotonic() < deadline_s
    assert pool.replacements == 1
    assert "proved weights 5" in " ".join(told)


def test_a_group_that_fails_everywhere_stops_the_run_with_the_log(patient: Shared) -> None:
    with pytest.raises(RolloutError, match=r"failed on 2 workers \(rollout.attempts\)"):
        generate(patient.pool, "always die", "well")
    assert "node's memory now" in patient.told[-1]


def test_broken_latents_of_two_workers_are_the_weights_fault(patient: Shared) -> None:
    with pytest.raises(RolloutError, match="latents are not finite"):
        generate(patient.pool, "always nan", "well")
    assert patient.replacements == 1


@pytest.mark.parametrize(("prompt", "broken"), [("broken once", 0), ("always broken", 1)])
def test_broken_held_out_pictures_are_drawn_on_a_second_worker(
    patient: Shared, prompt: str, broken: int
) -> None:
    (result,) = patient.pool.evaluate([ray.put(prompt)], lambda *_: None)
    assert result.broken_pictures == broken
    assert patient.replacements == 1


def test_the_others_do_not_wait_for_a_dead_worker(pools: Pools) -> None:
    hired = 0

    def hire(_avoided: Sequence[str]) -> Any:
        nonlocal hired
        hired += 1
        # There is never room for a replacement.
        return actor_class(StubWorker).options(num_cpus=0.25 if hired <= 2 else 1000).remote()

    pool = pools("rollout.workers=2", hire=hire)
    pool.wait_until_ready()
    assert generate(pool, "die", *["well"] * 6) == expected(7)
    # The other is through before the loss is tended to, every POLL_S; the next call sees to it.
    time.sleep(2 * POLL_S)
    assert generate(pool, *["well"] * 3) == expected(3)
    assert hired > 2
    assert len(pool.workers) == 1


def send(receivers: Sequence[Peer], version: int = 5) -> WeightReceipt:
    answers = ray.get([peer.handle.receive_weights.remote(version) for peer in receivers])
    held = zip(receivers, answers, strict=True)
    wrong = [peer for peer, answer in held if answer.version != version]
    if wrong:
        raise WeightSyncError("another checksum", wrong)
    return WeightReceipt(version, 1, 1, "")


def test_a_replacement_has_the_current_weights_before_its_first_work(lone: Shared) -> None:
    lone.pool.sync(send)
    done = lone.folder / "done"
    done.unlink(missing_ok=True)
    assert generate(lone.pool, "die", "well") == expected(2)
    assert lone.replacements == 1
    assert [line.split()[2] for line in done.read_text().splitlines()] == ["5", "5"]


def test_a_worker_with_a_wrong_checksum_is_replaced(patient: Shared) -> None:
    (patient.folder / "may garble").touch()
    assert patient.pool.sync(send).version == 5
    assert "another checksum" in patient.told[0]
    assert patient.replacements == 1
    assert generate(patient.pool, "well", "well") == expected(2)


def test_a_sync_that_nobody_can_be_blamed_for_stops_the_run(patient: Shared) -> None:
    def fail(_receivers: Sequence[Peer]) -> WeightReceipt:
        raise WeightSyncError("sent no tensor")

    with pytest.raises(WeightSyncError, match="sent no tensor"):
        patient.pool.sync(fail)
    assert patient.replacements == 0


def test_workers_that_find_no_place_are_named_with_what_is_free(pools: Pools) -> None:
    def nowhere(_avoided: Sequence[str]) -> Any:
        return actor_class(StubWorker).options(num_cpus=1000).remote()

    pool = pools("rollout.workers=2", "cluster.start_timeout_s=2", hire=nowhere)
    with pytest.raises(RolloutStartError) as caught:
        pool.wait_until_ready()
    assert "2 rollout workers are wanted" in str(caught.value)
    assert "2 placing" in str(caught.value)
    assert "Free by node" in str(caught.value)


def test_too_few_workers_for_too_long_stop_the_run(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("g2rpo_ray.rollout.crew.LONGEST_PAUSE_S", 1.0)
    pool = pools("rollout.workers=1")
    pool.wait_until_ready()
    pool._crew._start_timeout_s = 2.0
    (tmp_path / "no start").touch()
    with pytest.raises(RolloutError, match="1 rollout workers are wanted"):
        generate(pool, "die", "well")


def test_a_node_where_workers_keep_failing_is_avoided_unless_it_is_the_last(lone: Shared) -> None:
    (here,) = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    failures = lone.pool._crew._node_failures
    failures["bad"] = NODE_FAILURES
    # Each group dies once: this one is not the other test's.
    assert generate(lone.pool, "die", "well", "well") == expected(3)
    assert lone.asked == [["bad"]]
    failures[here] = NODE_FAILURES
    assert lone.pool._crew._avoided() == []
    failures.clear()


def grown(shared: Shared) -> RolloutPool:
    """Once it has as many workers as it may."""
    pool, deadline_s = shared.ready().pool, time.monotonic() + 480
    while len(pool.workers) < 3:
        generate(pool, *["slow"] * 8)
        assert time.monotonic() < deadline_s
    return pool


def test_new_workers_join_up_to_the_maximum_and_get_work(growing: Shared) -> None:
    pool, done = grown(growing), growing.folder / "done"
    done.unlink()
    generate(pool, *["slow"] * 6)
    assert len({line.split()[0] for line in done.read_text().splitlines()}) == 3
    assert pool.replacements == 0


def test_workers_without_work_end_also_while_the_driver_is_busy_elsewhere(growing: Shared) -> None:
    pool = grown(growing)
    with pool.resting():
        wait_until(lambda: len(pool.workers) == 1, "two workers to end", 120)
    assert "no work for it in 1 s" in " ".join(growing.told)
    # One prompt is work for one worker.
    assert generate(pool, "slow") == expected(1)
    assert len(pool._crew.members) == 1
    assert generate(pool, *["slow"] * 6) == expected(6)
    assert pool.replacements == 0
