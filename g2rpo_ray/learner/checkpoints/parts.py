"""Parts of the learner's state in safetensors files: what one rank writes, any number can read."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from g2rpo_ray.common.errors import InputError

PLACES = "places"
"""Key of a file's metadata: where each part begins, and the shape of the whole tensor."""


class CheckpointError(InputError):
    """A checkpoint cannot be used, or not be written as configured; the message says why."""


@dataclass(frozen=True)
class StatePart:
    """Part of one tensor of the state."""

    key: str
    """``weight.<name>``, ``exp_avg.<name>``, ..."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """First element of the flattened tensor that is here."""
    data: Tensor
    """float32, flat, on the CPU."""


def write_parts(path: Path, parts: Sequence[StatePart]) -> None:
    """One file, without a second copy of the tensors in memory."""
    places = {part.key: [part.start, list(part.shape)] for part in parts}
    save_file({p.key: p.data for p in parts}, path, metadata={PLACES: json.dumps(places)})


def equals_file(path: Path, parts: Sequence[StatePart]) -> bool:
    """Whether the file holds these parts to the bit; reads one tensor at a time."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            return names == {part.key for part in parts} and all(
                torch.equal(file.get_tensor(part.key), part.data) for part in parts
            )
    except SafetensorError:
        return False


class StateReader(Mapping[str, Tensor]):
    """The tensors of all files by key; only what is asked for is read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """
        Raises:
            CheckpointError: the files do not make up whole tensors.
        """
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, list[tuple[int, int, safe_open]]] = {}
        """Key -> where each part starts, its length, and its file."""
        for path in paths:
            file = safe_open(path, framework="pt")
            for key, (start, shape) in json.loads(file.metadata()[PLACES]).items():
                length = file.get_slice(key).get_shape()[0]
                self._shapes[key] = tuple(shape)
                self._places.setdefault(key, []).append((start, length, file))
        for key, places in self._places.items():
            places.sort(key=lambda place: place[0])
            end = 0
            for start, length, _ in places:
                end = end + length if start == end else -1
            if end != math.prod(self._shapes[key]):
                folder = paths[0].parent
                raise CheckpointError(f"{folder}: the files hold only parts of {key}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a whole tensor, without reading it."""
        return self._shapes[key]

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """float32 ``[stop - start]``: elements of the flattened tensor."""
        pieces = []
        for begin, length, file in self._places[key]:
            first, last = max(start, begin), min(stop, begin + length)
            if first < last:
                pieces.append(file.get_slice(key)[first - begin : last - begin])
        return torch.cat(pieces) if pieces else torch.empty(0)

    def __getitem__(self, key: str) -> Tensor:
        return self.read(key, 0, math.prod(self._shapes[key])).view(self._shapes[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
