"""How a script ends: by its own exit code, or in words where something given cannot be used."""

import sys
from collections.abc import Callable
from typing import NoReturn

from g2rpo_ray.common.errors import InputError


def run(main: Callable[[], int | None]) -> NoReturn:
    """Exit as ``main`` says; with 2 and what is wrong where a file or setting cannot be used."""
    try:
        sys.exit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
