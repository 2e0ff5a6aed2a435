"""Which roles share a card, as Ray places fractions of GPUs."""

import math
from collections.abc import Sequence

TOLERANCE = 1e-6
"""0.9 + 0.1 is one card."""


def pack(shares: Sequence[tuple[str, float]]) -> list[list[str]]:
    """Roles on every card, the largest share first, each on the first card with room.

    Args:
        shares: (role, cards it reserves); a role of 0 is on no card, one above 1 takes whole cards.
    """
    cards: list[list[str]] = []
    room: list[float] = []
    before, place = math.inf, 0
    for role, share in sorted(shares, key=lambda item: -item[1]):
        if share == 0:
            continue
        # Cards that were too full for a share are so for the next of the same size.
        if share != before:
            before, place = share, 0
        while place < len(cards) and share > room[place] + TOLERANCE:
            place += 1
        if place < len(cards):
            cards[place].append(role)
            room[place] -= share
            continue
        whole = math.ceil(share)
        cards += [[role] for _ in range(whole)]
        room += [0.0] * (whole - 1) + [whole - share]
    return cards
