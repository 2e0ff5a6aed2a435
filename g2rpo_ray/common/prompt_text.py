"""A prompt that carries what its file says of it beside the text."""

import unicodedata
from collections.abc import Mapping
from typing import Any, Self

CATEGORY_KEYS = ("category", "tag", "style")
"""Metadata by which prompt sets sort their prompts: PartiPrompts and DrawBench, GenEval, HPDv2."""


class PromptText(str):
    """A text like any other, also to whoever compares, hashes or writes it.

    Its metadata go with it where it is handed on, also to other processes; what makes another text
    of it (``strip``, ``+``) loses them.
    """

    __slots__ = ("metadata",)
    metadata: Mapping[str, Any]
    """Plain values, as of JSON, by the names that the prompt file has."""

    def __new__(cls, text: str, metadata: Mapping[str, Any] | None = None) -> Self:
        self = super().__new__(cls, text)
        self.metadata = metadata or {}
        return self


def is_blank(text: str) -> bool:
    """Whether nothing of it can be seen: white space and format characters (of no width) alone."""
    return all(c.isspace() or unicodedata.category(c) == "Cf" for c in text)


def metadata_of(prompt: str) -> Mapping[str, Any]:
    """What the prompt file says of a prompt; empty where it says nothing."""
    return prompt.metadata if isinstance(prompt, PromptText) else {}


def category_of(prompt: str) -> str | None:
    """The first of ``CATEGORY_KEYS``, in any case, that its metadata have as a text."""
    known = {name.lower(): value for name, value in metadata_of(prompt).items()}
    texts = (known.get(key) for key in CATEGORY_KEYS)
    return next((text for text in texts if isinstance(text, str) and text), None)
