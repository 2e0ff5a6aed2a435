"""A resource of 0 GPUs means none: no role takes a card that its process merely sees."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from g2rpo_ray.common.device import DeviceError, role_device
from tests.common.device.roles import COMMANDS, ROLES, Found
from tests.integration.command import ROOT, python_path

pytestmark = pytest.mark.slow

CARD = Path(__file__).parent / "visible_card"


TOOK_A_CARD = ("rollout_worker", "learner_rank", "sample")
"""Those that computed on a card that nobody had asked for; the long run has the others."""
OTHERS = tuple(name for name in [*ROLES, *COMMANDS] if name not in TOOK_A_CARD)


def each(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.long] * (n in OTHERS)) for n in names]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder with what was found of a role; starts it where torch sees a card."""
    folders: dict[tuple[str, ...], Path] = {}

    def folder_of(name: str) -> Path:
        together = TOOK_A_CARD if name in TOOK_A_CARD else OTHERS
        if together not in folders:
            folders[together] = start(tmp_path_factory.mktemp("roles"), together)
        return folders[together]

    return folder_of


def start(folder: Path, names: tuple[str, ...]) -> Path:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "DS_"))}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.common.device.roles", str(folder), *names],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": python_path(CARD), "CUDA_VISIBLE_DEVICES": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=540,
    )
    assert ended.returncode == 0, ended.stdout
    return folder


def found(started: Callable[[str], Path], name: str) -> Found:
    seen: Found = json.loads((started(name) / f"{name}.json").read_text())
    assert "error" not in seen, seen["error"]
    return seen


@pytest.mark.parametrize("name", each([*ROLES, *COMMANDS]))
def test_a_role_without_gpus_computes_on_the_cpu_where_torch_sees_a_card(
    started: Callable[[str], Path], name: str
) -> None:
    seen = found(started, name)
    assert seen["sees_a_card"], "nothing was tested: no card appeared"
    assert seen["devices"] == ["cpu"]
    assert not seen["initialized"]


@pytest.mark.parametrize("name", each(ROLES))
def test_ray_hides_cards_from_every_process_that_it_reserves_none_for(
    started: Callable[[str], Path], name: str
) -> None:
    assert found(started, name)["visible"] == ""


def test_ranks_without_gpus_meet_over_gloo_and_give_deepspeed_no_card(
    started: Callable[[str], Path],
) -> None:
    seen = found(started, "learner_rank")
    assert (seen["backend"], seen["accelerator"]) == ("gloo", "cpu")


def test_a_role_with_a_gpu_takes_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert role_device(1, "rollout.gpus_per_worker").type == "cuda"


def test_a_card_that_is_asked_for_and_is_not_there_is_no_reason_to_take_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError) as caught:
        role_device(0.5, "rollout.gpus_per_worker")
    for part in ("rollout.gpus_per_worker is 0.5", "can use no card", "to 0", "g2rpo doctor"):
        assert part in str(caught.value)
