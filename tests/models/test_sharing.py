"""A network that another process holds is the same network, to the bit, and stays the holder's."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from g2rpo_ray.config import Config
from g2rpo_ray.models import sharing
from g2rpo_ray.models.kernels import compile_blocks
from g2rpo_ray.models.loading import load_part
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.sharing import CardMemory, HostMemory, Lent, SharingError, lend
from g2rpo_ray.models.weights import trainable_parameters, word_sums
from tests.integration.command import python_path
from tests.models.families.folders import TINY, family_config
from tests.tiny import encode, equal_weights, tiny_config

CPU = torch.device("cpu")
OPEN = """
import json, pathlib, pickle, re, sys
from g2rpo_ray.models.weights import word_sums

def copied_kib():
    # Of the pages of the lender's memory that are mapped here: copies of this process's own.
    parts = pathlib.Path("/proc/self/smaps").read_text().split("memfd:frozen")[1:]
    return sum(int(re.search(r"Private_Dirty: +(\\d+) kB", part)[1]) for part in parts)

networks = [pickle.loads(pathlib.Path(file).read_bytes()).open() for file in sys.argv[1:]]
found = {}
for file, network in zip(sys.argv[1:], networks):
    state = {key: t for key, t in network.state_dict().items() if t.is_floating_point()}
    found[file] = dict(zip(state, word_sums(list(state.values()))))
copied = [copied_kib()]
for network in networks:
    for parameter in network.parameters():
        # A card's memory is the lender's own.
        if not parameter.is_cuda:
            parameter.add_(1)
print(json.dumps([found, *copied, copied_kib()]))
"""


def sums_of(network: torch.nn.Module) -> dict[str, int]:
    """Of every tensor of numbers that are not whole, by name."""
    state = {key: t for key, t in network.state_dict().items() if t.is_floating_point()}
    return dict(zip(state, word_sums(list(state.values())), strict=True))


def opened_elsewhere(*files: str) -> tuple[dict[str, dict[str, int]], int, int]:
    """What another process finds in pickled ``Lent``s: sums by file and name, and KiB that it has
    copied before and after it wrote to them."""
    child = subprocess.run(
        [sys.executable, "-c", OPEN, *files],
        env=os.environ | {"PYTHONPATH": python_path()},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    sums, before_kib, after_kib = json.loads(child.stdout.splitlines()[-1])
    return sums, before_kib, after_kib


def test_another_process_maps_the_same_bits_and_cannot_change_them(tmp_path: Path) -> None:
    networks = {}
    for name in TINY:
        for part in ("transformer", "vae"):
            network = load_part(family_config(name).model, part, torch.float32)
            file = tmp_path / f"{name}_{part}"
            sums = sums_of(network)
            file.write_bytes(pickle.dumps(lend(network, CPU)))
            # The weights are not in what is sent.
            assert file.stat().st_size < 100_000
            networks[str(file)] = network, sums
    found, before_kib, after_kib = opened_elsewhere(*networks)
    assert found == {file: sums for file, (_, sums) in networks.items()}
    assert before_kib == 0, "opening and reading made copies"
    assert after_kib > 0
    for network, sums in networks.values():
        assert sums_of(network) == sums, "what another process wrote has arrived"


def policies(config: Config) -> tuple[Policy, Policy]:
    """One that loads its weights, and one that maps a holder's."""
    kept: list[object] = []

    def load(*arguments: object) -> object:
        network = load_part(*arguments)  # type: ignore[arg-type]
        kept.append(network)
        return lend(network, CPU).open()

    return load_policy(config), load_policy(config, load=load)


@pytest.mark.gpu
def test_another_process_maps_a_cards_memory(tmp_path: Path) -> None:
    card, file = torch.device("cuda"), tmp_path / "lent"
    network = load_part(tiny_config(tmp_path).model, "transformer", torch.float32, card)
    lent = lend(network, card)
    assert isinstance(lent.memory, CardMemory)
    file.write_bytes(pickle.dumps(lent))
    found, *_ = opened_elsewhere(str(file))
    assert found == {str(file): sums_of(network)}


# Compiled in one family: what is compiled does not know where weights lie. Two thirds of what
# Inductor takes is the C++ compiler's.
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "") for name in TINY),
        ("flux1_dev", "aot_eager"),
        pytest.param("flux1_dev", "inductor", marks=pytest.mark.long),
    ],
)
def test_velocities_and_gradients_are_the_same_bits(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_plainly = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile_plainly(self, **options | {"backend": backend}),
    )
    config = family_config(name, "model.lora.rank=2")
    (prompt,) = encode(config)[:1]
    answers = []
    for policy in policies(config):
        if backend:
            compile_blocks(policy, cache=None)
        x = torch.randn(2, *policy.shape.packed, generator=torch.Generator().manual_seed(0))
        velocity = policy(x, torch.tensor([1.0, 0.4]), prompt.embeds)
        velocity.square().sum().backward()
        trained = trainable_parameters(policy)
        gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
        assert gradients
        answers.append({"velocity": velocity.detach(), **gradients, **dict(trained)})
    assert equal_weights(*answers)


def test_memory_whose_holder_has_gone_is_refused_with_the_reason(tmp_path: Path) -> None:
    lent = lend(torch.ones(3), CPU)
    assert isinstance(lent.memory, HostMemory)
    lent.memory._path = str(tmp_path / "gone")
    with pytest.raises(SharingError, match=r"gone.*No such file"):
        lent.open()


@pytest.fixture
def _as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's own handles, of CPU tensors: those of a card go the same way."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    monkeypatch.setattr(sharing, "HostMemory", CardMemory)
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.usefixtures("_as_on_a_card")
def test_handles_of_pytorch_give_the_same_network(tmp_path: Path) -> None:
    network = load_part(tiny_config(tmp_path).model, "transformer", torch.float32)
    lent = lend(network, CPU)
    assert isinstance(lent.memory, CardMemory)
    opened = lent.open()
    assert equal_weights(opened.state_dict(), network.state_dict())
    assert not any(parameter.requires_grad for parameter in opened.parameters())
    with torch.no_grad():
        next(network.parameters()).add_(1)
    assert equal_weights(opened.state_dict(), network.state_dict()), "a copy, not the same memory"


def refuse(*_: object) -> None:
    raise RuntimeError("CUDA error: invalid device context\nadvice for developers")


def test_a_card_that_cannot_be_mapped_is_refused_with_the_reason() -> None:
    memory = CardMemory([])
    memory._handles = [(refuse, ())]
    with pytest.raises(SharingError, match=r"^CUDA error: invalid device context advice"):
        Lent(b"", memory).open()
