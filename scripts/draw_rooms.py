"""Draw docs/images/rooms.svg: the rooms of the package, their imports, the way of a prompt.

    python scripts/draw_rooms.py

Read from the code, so that the picture is true: the order from the contract in pyproject.toml, what
a room is for from its docstring, the arrows from the import statements. What the way names must be
there; a test compares the committed picture with this one.
"""

import tomllib
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations, pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import grimp
from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOT = Path(__file__).parents[1]
PACKAGE = "g2rpo_ray"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

WIDTH, LEFT, RIGHT = 1000, 96, 890
"""Of the picture, and between which x the rooms lie; the way is left of them, imports right."""
TOP, ROOM_HEIGHT, STATION_HEIGHT, GAP = 92, 26, 18, 6
LONGEST_PURPOSE = 100
"""Characters that fit behind a room's name."""


WAY = [
    ("prompt", "the iteration's, by seed", "prompts.dataset.PromptOrder.batch"),
    ("embeddings", "encoded once, or read", "prompts.encoder.PromptEncoder.encode"),
    ("rollout group", "from one noise to pictures", "rollout.worker.RolloutWorker.rollout"),
    ("rewards", "a group's pictures at once", "rewards.server.RewardServer.score"),
    ("advantages", "z-scored, summed", "maths.advantage.integrate_advantages"),
    ("learner", "clipped objective, AdamW", "learner.worker.Learner.update"),
    ("weights", "sent, and verified", "weight_sync.base.WeightSync.sync"),
    ("rollout", "the next group, with new weights", "rollout.worker.RolloutWorker.receive_weights"),
]
"""Stations of a prompt: name, what happens there, class or function from the room on."""


class Stop(NamedTuple):
    """A station in the picture."""

    number: int
    y: float
    name: str
    what: str
    code: str


@dataclass(frozen=True)
class Room:
    """A room in the picture."""

    name: str
    purpose: str
    y: float
    height: float
    stops: list[Stop]

    @property
    def middle(self) -> float:
        """Where its arrows begin and end."""
        return self.y + self.height / 2


def draw() -> str:
    """The picture, as SVG."""
    names = room_names()
    rooms: dict[str, Room] = {}
    y = TOP
    for name in names:
        here = [(n, s) for n, s in enumerate(WAY, 1) if check(*s).startswith(f"{name}.")]
        stops = [
            Stop(number, y + ROOM_HEIGHT + STATION_HEIGHT * (line + 0.4), *station)
            for line, (number, station) in enumerate(here)
        ]
        height = ROOM_HEIGHT + STATION_HEIGHT * len(stops)
        rooms[name] = Room(name, purpose(name), y, height, stops)
        y += height + GAP
    stops = sorted((stop for room in rooms.values() for stop in room.stops), key=lambda s: s.number)
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template("rooms.svg")
    return template.render(
        width=WIDTH, left=LEFT, right=RIGHT, height=y + 10, rooms=rooms.values(),
        way=pairwise(stops),
        arrows=[
            (rooms[above], rooms[below], names.index(below) - names.index(above))
            for above, below in not_implied(names, imports(names))
        ],
    )  # fmt: skip


def room_names() -> list[str]:
    """From the top down, as import-linter enforces it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return layers


def purpose(room: str) -> str:
    """First line of the room's docstring.

    Raises:
        ValueError: there is none, or it is too long for the picture.
    """
    module = import_module(f"{PACKAGE}.{room}")
    first = (module.__doc__ or "").partition("\n")[0].replace("`", "")
    if not 0 < len(first) <= LONGEST_PURPOSE:
        raise ValueError(
            f"{module.__file__}: the first line of the docstring has {len(first)} characters; the "
            f"picture of the rooms has room for 1 to {LONGEST_PURPOSE}"
        )
    return first


def imports(rooms: list[str]) -> set[tuple[str, str]]:
    """(room, room below it that it imports), functions included; ``make lint`` allows no other."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    modules = {room: f"{PACKAGE}.{room}" for room in rooms}
    return {
        (room, other)
        for room, other in combinations(rooms, 2)
        if graph.direct_import_exists(
            importer=modules[room], imported=modules[other], as_packages=True
        )
    }


def not_implied(rooms: list[str], found: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without those imports that follow from two or more others, in the order of the rooms."""
    reached: dict[str, set[str]] = {}
    for room in reversed(rooms):
        below = {other for importer, other in found if importer == room}
        reached[room] = below.union(*(reached[other] for other in below))
    return [
        (room, other)
        for room, other in combinations(rooms, 2)
        if (room, other) in found
        and not any(other in reached[via] for importer, via in found if importer == room)
    ]


def check(name: str, _what: str, code: str) -> str:
    """The station's code.

    Raises:
        ValueError: the package has no such class or function.
    """
    try:
        resolve_name(f"{PACKAGE}.{code}")
    except (ImportError, AttributeError) as missing:
        raise ValueError(
            f"station {name!r} of the way of a prompt: {PACKAGE}.{code} is not "
            "there (any more); name what took its place in scripts/draw_rooms.py"
        ) from missing
    return code


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
