"""Without a card: the tests on one have settings that are allowed, as far as a network."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.flash3 import flash3_package  # noqa: F401
from tests.gpu import test_engine


class Asked(Exception):  # noqa: N818
    """A network was asked for."""


def load(*_: object) -> NoReturn:
    raise Asked


@pytest.mark.usefixtures("flash3_package")
@pytest.mark.parametrize("name", sorted(n for n in vars(test_engine) if n.startswith("test_")))
def test_a_test_of_the_engine_comes_to_its_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_engine, "CARD", torch.device("cpu"))
    for network in ("load_policy", "RolloutEngine"):
        monkeypatch.setattr(test_engine, network, load)
    with pytest.raises(Asked):
        getattr(test_engine, name)(tmp_path)
