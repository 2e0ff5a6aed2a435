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
    for role, share in sorted(shares, key=lambda item: -item[1]):
        if share == 0:
            continue
        place = next((i for i, left in enumerate(room) if share <= left + TOLERANCE), None)
        if place is not None:
            cards[place].append(role)
            room[place] -= share
            continue
        whole = math.ceil(share)
        cards += [[role] for _ in range(whole)]
        room += [0.0] * (whole - 1) + [whole - share]
    return cards
