"""One worker as the crew knows it, and what comes from it."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from g2rpo_ray.cluster.postmortem import Place
from g2rpo_ray.weight_sync import Peer

GETTING_WEIGHTS = "getting weights"


@dataclass
class Member:
    """A worker: first without a place, then loading, then with old weights, then ready."""

    number: int
    """Counts up; a replacement has a new one."""
    handle: Any
    since_s: float
    """Start of its present stage, or the end of its last task."""
    role: str
    stage: str = "placing"
    told: bool = False
    """Whether it was told that there is no place for it."""
    place: Place | None = None
    weight_version: int = 0
    finished: set[str] = field(default_factory=set)
    """Kinds of tasks that it has done at least once."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}" + (f" ({self.place})" if self.place else "")

    @property
    def peer(self) -> Peer:
        """As a receiver of weights."""
        return Peer(self.name, self.handle)


@dataclass(frozen=True)
class Event:
    """Something that a worker has answered."""

    worker: int
    what: str
    """A stage that it has reached, or ``answer``."""
    task: int
    future: Future
    at_s: float
