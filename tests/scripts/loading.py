"""The files in ``scripts/`` as modules: they are programs, and in no package."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    """``scripts/<name>.py``, imported anew."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Parsed(Exception):  # noqa: N818
    """A script's parser has taken its arguments."""


def script_options(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """What the parser of ``scripts/<name>.py`` makes of them; it goes no further."""
    found: list[argparse.Namespace] = []

    def parses(real: Callable[..., argparse.Namespace]) -> Callable[..., NoReturn]:
        def parse(self: argparse.ArgumentParser, args: Any = None, _: Any = None) -> NoReturn:
            found.append(real(self, args))
            raise Parsed

        return parse

    with pytest.MonkeyPatch.context() as patch:
        # A way that is not here would run the script.
        for way in ("parse_args", "parse_intermixed_args"):
            real = getattr(argparse.ArgumentParser, way)
            patch.setattr(argparse.ArgumentParser, way, parses(real))
        patch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Parsed):
            importlib.import_module(name).main()
    return found[0]
