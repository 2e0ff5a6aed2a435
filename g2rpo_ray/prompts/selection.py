"""Which prompts are kept: without doubles, of a length, in a language."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.prompts.dataset import evenly


class SelectionError(InputError):
    """A selection cannot be made as asked."""


@dataclass(frozen=True)
class Selection:
    """Options of ``g2rpo embed``; by default everything is kept."""

    dedup: bool = False
    """Keep the first of prompts that are equal but for case and white space."""
    min_characters: int = 0
    max_characters: int | None = None
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes to keep; empty keeps all."""
    limit: int | None = None
    """Keep so many, evenly spaced over what is left."""


@dataclass(frozen=True)
class Selected:
    """What is left, and what is not."""

    prompts: list[str]
    left_out: dict[str, int]
    """Reason -> prompts."""


def select(prompts: Sequence[str], selection: Selection) -> Selected:
    """Apply the options in their order.

    Raises:
        SelectionError: nothing is left, a language is unknown, or its package is missing.
    """
    kept = list(prompts)
    left_out: dict[str, int] = {}

    def keep(reason: str, texts: Iterable[str]) -> None:
        nonlocal kept
        before, kept = kept, list(texts)
        if len(kept) < len(before):
            left_out[reason] = len(before) - len(kept)

    if selection.dedup:
        first: dict[str, str] = {}
        for text in kept:
            first.setdefault(" ".join(text.casefold().split()), text)
        keep("double", first.values())
    keep("shorter", (text for text in kept if len(text) >= selection.min_characters))
    if (longest := selection.max_characters) is not None:
        keep("longer", (text for text in kept if len(text) <= longest))
    if selection.languages:
        language_of = _identifier(selection.languages)
        keep("other language", (t for t in kept if language_of(t) in selection.languages))
    if selection.limit is not None:
        keep("over the limit", evenly(kept, selection.limit))
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise SelectionError(f"no prompt of {len(prompts)} is left: {reasons}")
    return Selected(kept, left_out)


def _identifier(languages: Sequence[str]) -> Callable[[str], str]:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise SelectionError(
            "--language needs the package py3langid: pip install 'g2rpo-ray[language]'"
        ) from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    unknown = [language for language in languages if language not in identifier.labels]
    if unknown:
        raise SelectionError(
            f"--language {', '.join(unknown)}: not known; known are "
            f"{', '.join(sorted(identifier.labels))}"
        )
    return lambda text: str(identifier.classify(text)[0])
