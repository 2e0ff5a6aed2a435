"""Operations and memory of whatever is computed on PyTorch's meta device, without computing it."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

TERA = 1e12
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one sample; a multiply-add counts as two."""

    matrix: float
    """Products with weights, convolutions included."""
    attention: float
    """The two products inside attention, which grow with the square of the tokens."""
    peak_bytes: float = 0.0
    """Most bytes that tensors made meanwhile held at once."""

    @property
    def tflop(self) -> float:
        return (self.matrix + self.attention) / TERA


def count_operations(run: Callable[[], object]) -> Operations:
    """Of whatever ``run`` computes on the meta device, without gradients."""
    with _flash(), FlopCounterMode(display=False) as counter, torch.no_grad():
        peak_bytes = count_bytes(run)
    total = counter.get_total_flops()
    attention = counter.get_flop_counts()["Global"].get(_FLASH, 0)
    return Operations(matrix=total - attention, attention=attention, peak_bytes=peak_bytes)


def count_bytes(run: Callable[[], object]) -> int:
    """Most bytes that tensors made by ``run`` hold at once, operation by operation: compiled code,
    which makes fewer of them, needs less."""
    with _flash(), _Living() as living:
        run()
    return living.most


class _Living(TorchDispatchMode):
    """Adds up the storages that operations made and that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._held: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(found):
            storage = tensor.untyped_storage()
            # Views share a storage, and in-place operations give back the one they were given.
            if (key := storage._cdata) not in given and key not in self._held:
                self._held.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _free(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.now -= size


def _tensors(tree: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


@contextmanager
def _flash() -> Iterator[None]:
    """Attention as a card's kernel has it; the meta device's own makes every pair of tokens."""
    own = functional.scaled_dot_product_attention

    def flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return _FLASH(query, key, value)[0]

    functional.scaled_dot_product_attention = flash
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own
