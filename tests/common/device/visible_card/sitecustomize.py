"""On the path of a process, and of all that it starts: torch there says that it sees one card."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Patched(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # Whatever CUDA_VISIBLE_DEVICES says: a role must not depend on who hides cards from it.
        module.is_available = lambda: True  # type: ignore[attr-defined]
        module.device_count = lambda: 1  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.cuda":
            return None
        spec = PathFinder.find_spec(name, path, target)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            spec.loader = _Patched(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
