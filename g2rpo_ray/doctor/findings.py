"""Findings, and the report made of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any


class Level(IntEnum):
    """How bad a finding is; also the exit code of a report whose worst finding it is."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: Level
    what: str
    remedy: str = ""
    """What to do; never empty for WARN and FAIL."""

    def __post_init__(self) -> None:
        if self.level > Level.OK and not self.remedy:
            raise ValueError(f"a finding that is no OK needs a remedy: {self.what}")


def ok(check: str, what: str) -> Finding:
    return Finding(check, Level.OK, what)


def warn(check: str, what: str, remedy: str) -> Finding:
    return Finding(check, Level.WARN, what, remedy)


def fail(check: str, what: str, remedy: str) -> Finding:
    return Finding(check, Level.FAIL, what, remedy)


def warn_if(low: bool, check: str, what: str, remedy: str) -> Finding:
    """A warning with its remedy, or the same fact as an OK."""
    return warn(check, what, remedy) if low else ok(check, what)


def worst(findings: Sequence[Finding]) -> Level:
    return max((finding.level for finding in findings), default=Level.OK)


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, its remedy below it, and a sum at the end."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.name:<4}  {finding.check:<{width}}  {finding.what}")
        if finding.remedy:
            lines.append(f"{'':<{width + 8}}-> {finding.remedy}")
    counts = [f"{sum(f.level == level for f in findings)} {level.name}" for level in Level]
    return "\n".join([*lines, ", ".join(counts)])


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """``{"worst": "OK", "findings": [{"check", "level", "what", "remedy"}]}``."""
    return {
        "worst": worst(findings).name,
        "findings": [asdict(f) | {"level": f.level.name} for f in findings],
    }
