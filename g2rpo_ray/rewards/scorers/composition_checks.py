"""GenEval's checks (arXiv 2310.11513): what a prompt asks for, against what was found.

Include clauses must all hold. Colour and position are looked at in the most confident objects
alone, as many as the clause wants.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.common.section import Section, problems
from g2rpo_ray.rewards.scorer import ScorerError

Colour = Literal[
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"
]
COLOURS: tuple[Colour, ...] = get_args(Colour)
POSITION_THRESHOLD = 0.1
"""Of both objects' sizes: nearer centres count as no offset."""
LEAST_COSINE = 0.5
"""Of the offset with a direction, from which it is that relation."""
DIRECTIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""
Objects = Mapping[str, Sequence[Box]]
"""Boxes by class, the most confident first."""


class _Clause(Section):
    name: str = Field(alias="class", min_length=1)
    count: int = Field(1, ge=1)


class _Include(_Clause):
    color: Colour | None = None
    position: Annotated[list[str | int], Field(min_length=2, max_length=2)] | None = None
    """Relation, and the place of the clause whose objects it is to."""


class Composition(Section):
    """What GenEval's jsonl asks of a prompt's picture."""

    include: list[_Include] = Field(default_factory=list)
    exclude: list[_Clause] = Field(default_factory=list)
    """A class of which there shall be fewer than ``count``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.include and not self.exclude:
            raise ValueError("neither include nor exclude says what to look for")
        for place, clause in enumerate(self.include):
            relation, target = clause.position or ("above", -1)
            if relation not in DIRECTIONS:
                raise ValueError(
                    f"include.{place}.position: {relation!r}; known are {', '.join(DIRECTIONS)}"
                )
            if clause.position and not (isinstance(target, int) and 0 <= target < place):
                raise ValueError(
                    f"include.{place}.position: {target!r} is no place of a clause before it"
                )
        return self

    @property
    def classes(self) -> list[str]:
        return sorted({clause.name for clause in [*self.include, *self.exclude]})


def read_composition(prompt: str) -> Composition:
    """What a prompt's metadata ask for.

    Raises:
        ScorerError: there is no ``include`` or ``exclude``, or not as GenEval's are.
    """
    found = {key: metadata_of(prompt).get(key) for key in ("include", "exclude")}
    try:
        return Composition.model_validate({k: v for k, v in found.items() if v is not None})
    except ValidationError as error:
        raise ScorerError(
            f"prompt {prompt!r:.80}: its metadata are not as GenEval's: {problems(error)[0]}; "
            'expected such as "include": [{"class": "cat", "count": 2, "color": "red"}]'
        ) from error


def checks(wanted: Composition, objects: Objects, colours: Iterator[str]) -> list[float]:
    """How far each check holds, 0 to 1; where all are 1, GenEval calls the picture correct.

    A number too small or too large loses its distance by the number wanted (as Flow-GRPO's reward);
    colours and positions count the share of objects, or pairs, that are right.

    Args:
        colours: of the first ``count`` objects of each clause that wants one, clause after clause.
    """
    results: list[float] = []
    groups: list[Sequence[Box]] = []
    # Several for a class: the least, which sorting leaves for last.
    excluded = sorted(wanted.exclude, key=lambda clause: -clause.count)
    most = {clause.name: clause.count - 1 for clause in excluded}
    included = {clause.name for clause in wanted.include}
    for clause in wanted.include:
        there = objects.get(clause.name, ())
        group = there[: clause.count]
        groups.append(group)
        surplus = max(0, len(there) - max(most.get(clause.name, len(there)), clause.count))
        if len(group) < clause.count:
            results.append(len(group) / clause.count)
        else:
            results.append(max(0.0, 1 - surplus / clause.count))
        if clause.color is not None:
            named = islice(colours, len(group))
            results.append(sum(colour == clause.color for colour in named) / clause.count)
        if clause.position is not None:
            relation, target = clause.position
            pairs = [(one, other) for one in group for other in groups[int(target)]]
            right = sum(relation in relations(one, other) for one, other in pairs)
            results.append(right / len(pairs) if pairs else 0.0)
    for name in most.keys() - included:
        results.append(float(len(objects.get(name, ())) <= most[name]))
    return results


def relations(box: Box, other: Box) -> set[str]:
    """Where a box lies from another: none, one or two of ``DIRECTIONS``."""
    import numpy as np

    corners = np.array([box, other]).reshape(2, 2, 2)
    (centre, other_centre), sizes = corners.mean(1), np.ptp(corners, 1)
    offset = centre - other_centre
    beyond = np.maximum(np.abs(offset) - POSITION_THRESHOLD * sizes.sum(0), 0) * np.sign(offset)
    if np.abs(beyond).max() < 1e-3:
        return set()
    direction = beyond / np.linalg.norm(offset)
    return {name for name, unit in DIRECTIONS.items() if direction @ unit > LEAST_COSINE}
