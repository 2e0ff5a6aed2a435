"""Importing large libraries."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python does not look for garbage.

    What a library makes when it is imported is none: looking takes a quarter of the time (diffusers
    with its FLUX classes: 4.0 s of CPU, and 3.1 s inside). Nor does it look there later, but where
    nothing was imported: a worker is ready after 4.5 s of CPU, not 5.0.
    """
    collects, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if len(sys.modules) > before:
                gc.freeze()
            gc.enable()
