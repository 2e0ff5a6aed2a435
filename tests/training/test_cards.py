"""Cards that are too small for a run are named before anything is loaded."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import ray

from g2rpo_ray.cluster import cards as cards_of_nodes
from g2rpo_ray.cluster.cards import node_gpus
from g2rpo_ray.cluster.demand import ClusterError, living_nodes
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.plan.prediction import Predictor
from g2rpo_ray.plan.small_cards import needed_gib
from g2rpo_ray.training import cards, roles
from tests.tiny import QUICKSTART


def recipe(name: str, *overrides: str) -> Config:
    return load_config(QUICKSTART.with_name(f"{name}.yaml"), overrides)


def on_a_card() -> Config:
    """The quickstart, whose worker and rank share one."""
    shares = ("rollout.gpus_per_worker=0.5", "learner.gpus_per_rank=0.5", "learner.ranks=1")
    return load_config(QUICKSTART, (*shares, "rollout.workers=1"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``launch`` told; it goes no further than to ask for room."""

    @contextmanager
    def connected(*_: object) -> Iterator[bool]:
        yield False

    @contextmanager
    def room(*_: object) -> Iterator[None]:
        raise RuntimeError("asked for room")
        yield

    monkeypatch.setattr(roles, "_cluster", connected)
    monkeypatch.setattr(roles, "_room", room)
    monkeypatch.setattr(cards, "living_nodes", list)
    return []


def launch(
    monkeypatch: pytest.MonkeyPatch, told: list[str], config: Config, *gib: float, why: str = ""
) -> None:
    monkeypatch.setattr(cards, "memory_of_cards", lambda _: (list(gib), [why] if why else []))
    with roles.launch(config, None, told.append):
        pytest.fail("nothing can have started")


@pytest.mark.slow
def test_a_card_that_is_far_too_small_is_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    config = recipe("flux_g2rpo_hps_40gb_lora")
    with pytest.raises(ClusterError) as refused:
        launch(monkeypatch, launched, config, 24.0)
    message = str(refused.value)
    assert "rollout worker" in message
    assert "need 35.4 GiB on one card by 'g2rpo plan', and the largest card has 24.0" in message
    assert "cluster.refuse_small_cards=false tries it anyway" in message
    # What it says would fit does.
    settings = message.partition("this fits: ")[2].partition(" (")[0].split()
    assert "model.frozen_dtype=float8" in settings
    assert needed_gib(recipe("flux_g2rpo_hps_40gb_lora", *settings))[1] <= 24.0
    assert launched == []

    with pytest.raises(RuntimeError, match="asked for room"):
        launch(
            monkeypatch,
            launched,
            recipe("flux_g2rpo_hps_40gb_lora", "cluster.refuse_small_cards=false"),
            24.0,
        )
    assert launched[0].startswith("warning: ")
    assert "need 35.4 GiB" in launched[0]


@pytest.mark.parametrize(
    ("sizes", "told"), [((1.01,), ""), ((0.92,), "a card has"), ((9.0, 0.3), "a card has")]
)
def test_a_card_within_a_tenth_of_the_plan_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, launched: list[str], sizes: tuple[float, ...], told: str
) -> None:
    needed = needed_gib(on_a_card())[1]
    assert 3 < needed < 9
    with pytest.raises(RuntimeError, match="asked for room"):
        launch(monkeypatch, launched, on_a_card(), *(size * needed for size in sizes))
    assert len(launched) == bool(told)
    assert all(told in line and line.startswith("warning: ") for line in launched)


def test_what_is_not_known_is_told_and_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    config = on_a_card()
    with pytest.raises(RuntimeError, match="asked for room"):
        launch(monkeypatch, launched, config, why="10.0.0.1: no nvidia-smi")
    assert launched == ["memory of cards is not compared with the plan: 10.0.0.1: no nvidia-smi"]
    # On CPUs nobody asks.
    with pytest.raises(RuntimeError, match="asked for room"):
        launch(monkeypatch, launched, load_config(QUICKSTART), 1.0)
    assert len(launched) == 1


def test_where_no_setting_helps_that_is_said(
    monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    """A process takes more than a card of 1 GiB, whatever it holds."""
    with pytest.raises(ClusterError, match=r"No setting makes it fit: .*take adapters .*fewer rol"):
        launch(monkeypatch, launched, on_a_card(), 1.0)


def test_an_automatic_batch_is_counted_as_one() -> None:
    auto, one = (recipe("flux_g2rpo_hps_40gb_lora", f"rollout.batch_size={n}") for n in ("auto", 1))
    assert needed_gib(auto) == needed_gib(one)
    predictor = Predictor(recipe("flux_g2rpo_hps_40gb_lora"), load_costs(), "RTX4090-24")
    assert needed_gib(predictor.config) == predictor.fullest_card(1, 1)


SMI = "#!/bin/sh\necho 'NVIDIA GB10, 580.1, {total}, 4'\n"


def test_cards_as_nvidia_smi_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_gpus() is None
    smi = tmp_path / "nvidia-smi"
    smi.touch(0o755)
    smi.write_text(SMI.format(total=81559))
    assert node_gpus() == [cards_of_nodes.Gpu("NVIDIA GB10", "580.1", 81559, 4)]
    smi.write_text(SMI.format(total="[N/A]"))
    with pytest.raises(RuntimeError, match="does not know the memory of a card"):
        node_gpus()
    smi.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    with pytest.raises(RuntimeError, match="nvidia-smi fails: no driver"):
        node_gpus()


@pytest.mark.usefixtures("ray_cluster")
def test_nodes_are_asked_together_and_one_that_is_silent_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (here,) = living_nodes()
    nodes = [replace(here, address=name, total={"GPU": 1.0}) for name in ("one", "other")]
    nodes.append(replace(here, address="of CPUs"))

    def silent() -> None:
        time.sleep(5)

    def knows() -> list[cards_of_nodes.Gpu]:
        return [cards_of_nodes.Gpu("H200", "580.1", 143771, 4)]

    monkeypatch.setattr(cards_of_nodes, "node_gpus", knows)
    assert cards_of_nodes.memory_of_cards(nodes) == ([143771 / 1024] * 2, [])
    monkeypatch.setattr(cards_of_nodes, "node_gpus", silent)
    monkeypatch.setattr(cards_of_nodes, "ANSWER_TIMEOUT_S", 0.5)
    told = [f"{name}: no answer within 0.5 s" for name in ("one", "other")]
    with mock.patch.object(ray, "wait", wraps=ray.wait) as wait:
        assert cards_of_nodes.memory_of_cards(nodes) == ([], told)
    # One limit for all of them, not one for each.
    assert wait.call_count == 1
    assert cards_of_nodes.memory_of_cards(nodes[2:]) == ([], [])
