"""The picture of the rooms is what the code says."""

import pytest

from tests.scripts.loading import load_script

rooms = load_script("draw_rooms")


def test_the_committed_picture_is_todays() -> None:
    drawn = rooms.draw()
    assert rooms.PICTURE.read_text(encoding="utf-8") == drawn, "run: python scripts/draw_rooms.py"


def test_every_import_is_drawn_or_follows_from_those_that_are() -> None:
    names = rooms.room_names()
    found = rooms.imports(names)
    reached: dict[str, set[str]] = {}
    drawn = rooms.not_implied(names, found)
    for room in reversed(names):
        below = {other for importer, other in drawn if importer == room}
        reached[room] = below.union(*(reached[other] for other in below))
    assert all(other in reached[room] for room, other in found)
    # None of them could be left out: no two ways lead from a room to one that it points at.
    for room, other in drawn:
        assert not any(other in reached[via] for importer, via in drawn if importer == room)


def test_a_station_that_is_gone_is_named() -> None:
    for code in ("learner.worker.Learner.teach", "learner.nowhere.Learner", "maths.sde.gone"):
        with pytest.raises(ValueError, match=rf"'learner' .* g2rpo_ray\.{code} is not there"):
            rooms.check("learner", "", code)
