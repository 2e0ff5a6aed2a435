"""Garbage is looked for again after an import, also after one that failed."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from g2rpo_ray.common.imports import uncollected


def test_garbage_is_not_looked_for_inside_alone() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), uncollected():
        import no_such_module  # noqa: F401
    assert gc.isenabled()


def test_what_was_imported_is_never_looked_at_again(tmp_path: Path) -> None:
    (tmp_path / "a_large_library.py").write_text("made = [[] for _ in range(1000)]")
    code = (
        "import gc\nfrom g2rpo_ray.common.imports import uncollected\n"
        "def inside():\n    with uncollected():\n        import a_large_library\n"
        "    return gc.get_freeze_count()\n"
        "print(inside(), [] or inside())"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    first, second = map(int, done.stdout.split())
    # What a run makes later may become garbage.
    assert first == second > 1000
