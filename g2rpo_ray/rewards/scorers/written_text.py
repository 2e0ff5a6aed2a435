"""The text that a prompt asks for, and how near what was read in a picture comes to it."""

import unicodedata
from collections.abc import Collection, Sequence
from itertools import permutations

from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.rewards.scorer import ScorerError

QUOTES = {'"': '"', "“": "”", "„": "“”", "«": "»", "「": "」", "『": "』"}
"""What opens a text in a prompt, and what closes it. Single quotes are apostrophes, too."""
APOSTROPHES = str.maketrans("’‘", "''")
MOST_ORDERED = 4
"""Texts that are tried in every order; more stay in the prompt's."""


def wanted_texts(prompt: str, field: str | None) -> list[str]:
    """The texts that a picture of this prompt shall show.

    Args:
        field: key of the prompt's metadata, which holds a text or a list of texts; None takes what
            stands in double quotes in the prompt.

    Raises:
        ScorerError: there is none, a quote does not close, or one runs from right to left.
    """
    texts = _quoted(prompt) if field is None else _of_field(prompt, field)
    if not any(map(comparable, texts)):
        where = "in double quotes" if field is None else f"under {field!r} in its metadata"
        raise ScorerError(f"prompt {prompt!r:.80}: no text {where} that a picture could show")
    for text in texts:
        if any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in text):
            raise ScorerError(
                f"prompt {prompt!r:.80}: {text!r:.40} runs from right to left; PP-OCR reads text "
                "from left to right alone"
            )
    return [text for text in texts if comparable(text)]


def _of_field(prompt: str, field: str) -> list[str]:
    metadata = metadata_of(prompt)
    if field not in metadata:
        raise ScorerError(
            f"prompt {prompt!r:.80}: no {field!r} in its metadata (there: "
            f"{', '.join(map(repr, metadata)) or 'nothing'}); rewards.<name>.options.field names "
            "the key of the prompt file that holds the text"
        )
    value = metadata[field]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ScorerError(
            f"prompt {prompt!r:.80}: {field!r} is {value!r:.40}; expected a text or a list of texts"
        )
    return texts


def _quoted(prompt: str) -> list[str]:
    texts, place = [], 0
    while place < len(prompt):
        if closing := QUOTES.get(prompt[place]):
            ends = (prompt.find(mark, place + 1) for mark in closing)
            end = min((found for found in ends if found > 0), default=None)
            if end is None:
                raise ScorerError(
                    f"prompt {prompt!r:.80}: the quote that opens at character {place + 1}, "
                    f"{prompt[place : place + 20]!r}, does not close with {' or '.join(closing)}"
                )
            texts.append(prompt[place + 1 : end])
            place = end
        place += 1
    return texts


def comparable(text: str) -> str:
    """Lower case without white space, as Flow-GRPO compares; and one form for each character."""
    folded = unicodedata.normalize("NFKC", text).translate(APOSTROPHES).lower()
    return "".join(folded.split())


def similarity(texts: Sequence[str], lines: Sequence[str]) -> float:
    """1 - edit distance / characters that are wanted, from 0 to 1 (Flow-GRPO, arXiv 2505.05470).

    What was read is taken as one string. A text that stands in it has distance 0, whatever stands
    beside it; another counts what was read beside, up to its own length. Texts may come in any
    order: those that stand there are taken out, the others are tried in each.

    Args:
        texts: wanted, each of 1 character or more; ``comparable``.
        lines: read, in reading order; ``comparable``.
    """
    pieces, missing = ["".join(lines)], []
    # The longest first, else "open" could be taken out of "opening".
    for place in sorted(range(len(texts)), key=lambda place: -len(texts[place])):
        text = texts[place]
        found = next((n for n, piece in enumerate(pieces) if text in piece), None)
        if found is None:
            missing.append(place)
        else:
            pieces[found : found + 1] = pieces[found].split(text, 1)
    rest, left = "".join(pieces), [texts[place] for place in sorted(missing)]
    orders = permutations(left) if len(left) <= MOST_ORDERED else [left]
    wanted = {"".join(order) for order in orders}
    return 1 - _least_distance(wanted, rest) / sum(map(len, texts))


def _least_distance(wanted: Collection[str], read: str) -> int:
    """To the nearest of strings of one length, which is the largest distance, too."""
    most = len(next(iter(wanted)))
    if not read or len(read) >= 2 * most:
        return most
    return min(most, *(edit_distance(text, read) for text in wanted))


def edit_distance(first: str, second: str) -> int:
    """Levenshtein's: the fewest characters to put in, take out or replace."""
    import numpy as np

    letters = np.array([ord(letter) for letter in second], dtype=np.int64)
    places = np.arange(len(second) + 1)
    row = places
    for number, letter in enumerate(first, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (letters != ord(letter)))
        # Characters put in: each costs 1 more than its left neighbour.
        row = np.minimum.accumulate(np.concatenate(([number], best)) - places) + places
    return int(row[-1])
