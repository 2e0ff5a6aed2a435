"""Garbage is looked for again after an import, also after one that failed."""

import gc

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
