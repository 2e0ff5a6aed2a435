"""Importing large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python does not look for garbage.

    What a library makes when it is imported is none: looking takes a quarter of the time (diffusers
    with its FLUX classes: 4.0 s of CPU, and 3.1 s inside).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
