"""Operations and memory of whatever is computed on PyTorch's meta device, without computing it."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

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
    with torch.no_grad():
        counted = _count(run)
    attention = counted.operations[_FLASH]
    matrix = counted.operations.total() - attention
    return Operations(matrix=matrix, attention=attention, peak_bytes=counted.most)


def count_bytes(run: Callable[[], object]) -> int:
    """Most bytes that tensors made by ``run`` hold at once, operation by operation: compiled code,
    which makes fewer of them, needs less."""
    return _count(run).most


def _count(run: Callable[[], object]) -> "_Counter":
    with _flash(), _Counter() as counter:
        run()
    return counter


class _Counter(TorchDispatchMode):
    """Adds up operations, and the storages that they made and that are still held.

    A network's blocks are alike: what was made of tensors of these sizes is made again as it was,
    in a tenth of the time that the meta device takes to find it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[Any] = Counter()
        self.now = self.most = 0
        self._held: set[int] = set()
        self._known: dict[Any, tuple[list[Any], bool, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        key = func, _described(args), _described(tuple(kwargs.items()))
        if key in self._known:
            sizes, is_one, operations = self._known[key]
            tensors = [
                torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                for shape, stride, dtype in sizes
            ]
            found: Any = tensors[0] if is_one else tuple(tensors)
        else:
            found = func(*args, **kwargs)
            formula = flop_registry.get(func._overloadpacket)
            operations = formula(*args, **kwargs, out_val=found) if formula else 0
            given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
            # Of in-place operations, and of some that give a view without saying so, it is given.
            tensors = [t for t in _tensors(found) if t.untyped_storage()._cdata not in given]
            made_whole = len(tensors) == len(tree_leaves(found)) > 0
            if made_whole and all(tensor.is_meta for tensor in tensors):
                sizes = [(t.shape, t.stride(), t.dtype) for t in tensors]
                self._known[key] = sizes, isinstance(found, Tensor), operations
        self.operations[func._overloadpacket] += operations
        for tensor in tensors:
            self._hold(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return found

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._held:
            self._held.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.now -= size


def _described(value: object) -> Any:
    """What decides about the sizes of a result, hashable."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    # Numbers of different types are equal and make other dtypes.
    return type(value), value


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
