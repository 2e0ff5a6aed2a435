"""What every section of settings has in common."""

import re
from collections import Counter
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from g2rpo_ray.common.errors import InputError

_BRANCH = re.compile(r"bool|str|int|constrained-int|literal\[.*\]")


class ConfigError(InputError):
    """The configuration cannot be used; the message says where, what, and what is allowed."""


class Section(BaseModel):
    """A group of settings: unknown keys, loose types and numbers that are not finite are errors;
    values cannot change later."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )


def check_gpus(gpus: float) -> float:
    """The number itself, if Ray can give one process so many GPUs.

    Raises:
        ValueError: it is neither a share of one GPU nor a whole number.
    """
    if not (0 <= gpus <= 1 or (gpus > 1 and gpus.is_integer())):
        raise ValueError(
            f"{gpus:g} GPUs; one process gets a share of one GPU (0 to 1), or whole GPUs"
        )
    return gpus


Gpus = Annotated[float, Field(ge=0), AfterValidator(check_gpus)]
"""GPUs of one process."""
LARGEST_SHARED = 0.5
"""The largest share of a card that two processes can have on the same one."""


def check_deadlines(min_deadline_s: float, timeout_s: float) -> None:
    """Refuse a shortest deadline above the longest.

    Raises:
        ValueError: it is above.
    """
    if min_deadline_s > timeout_s:
        raise ValueError(
            f"min_deadline_s is {min_deadline_s:g} and timeout_s is {timeout_s:g}, which would cut "
            "it off; make min_deadline_s at most timeout_s"
        )


def problems(error: ValidationError) -> list[str]:
    """What is wrong, a line for each: key, cause, value."""
    lines, either = list[str](), dict[str, list[str]]()
    found = error.errors()
    parents = Counter(problem["loc"][:-1] for problem in found if _is_branch(problem["loc"]))
    for problem in found:
        is_branch = _is_branch(problem["loc"]) and parents[problem["loc"][:-1]] > 1
        key = ".".join(str(part) for part in problem["loc"][: -1 if is_branch else None])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key (value {problem['input']!r:.60})")
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing, it has no default")
        elif problem["type"] == "value_error":
            lines.append(f"{key}: {message}" if key else message)
        elif is_branch:
            # One line for all that it may be, in the place of the last.
            either.setdefault(key, []).append(message.removeprefix("Input should be "))
            if len(either[key]) == parents[problem["loc"][:-1]]:
                allowed = ", or ".join(either[key])
                lines.append(f"{key}: Input should be {allowed} (got {problem['input']!r:.60})")
        else:
            lines.append(f"{key}: {message} (got {problem['input']!r:.60})")
    return lines


def _is_branch(place: tuple[int | str, ...]) -> bool:
    """Whether it ends in one of the kinds that a value may have, which is no key."""
    return bool(place) and bool(_BRANCH.fullmatch(str(place[-1])))
