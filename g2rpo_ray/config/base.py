"""What every section of settings has in common."""

from pydantic import BaseModel, ConfigDict, ValidationError

from g2rpo_ray.errors import InputError


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
    )


def problems(error: ValidationError) -> list[str]:
    """What is wrong, a line for each: key, cause, value."""
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key (value {problem['input']!r:.60})")
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing, it has no default")
        elif problem["type"] == "value_error":
            lines.append(f"{key}: {message}" if key else message)
        else:
            lines.append(f"{key}: {message} (got {problem['input']!r:.60})")
    return lines
