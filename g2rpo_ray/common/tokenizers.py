"""Tokenizers: read from local files alone, and refused where they cannot tell texts apart.

Without its vocabulary the libraries go on with a handful of special tokens: every text is the same.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from g2rpo_ray.common.files import read_json_object

UNLIKE = ("red cat", "sky fog")
"""As long, with no letter in common: where all that is left is "unknown", they are the same."""
LEAST_SHARE = 0.8
"""Of an embedding's rows that have a token: rows are often rounded up, by a few in a hundred."""
MOST_UNREACHABLE = 0.001
"""Of a vocabulary, tokens that no merge makes; published ones have none or a few."""
JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "added_tokens.json", "vocab.json", "processor_config.json",
              "preprocessor_config.json")  # fmt: skip


def load_tokenizer(
    load: Callable[[], Any], source: Path | str, rows: int | None, error: type[Exception]
) -> Any:
    """A tokenizer, or a processor that holds one, checked.

    Args:
        load: reads it, without a network.
        source: its folder, or its name where it comes with a library.
        rows: of the embedding that its ids go to; None where that is not known yet.

    Raises:
        error: a file is missing, cut short or of another kind; the vocabulary is not the
            embedding's; or unlike texts get the same ids.
    """
    folder = Path(source)
    for name in JSON_FILES:
        if (folder / name).is_file():
            read_json_object(folder / name, error)
    try:
        loaded = load()
        problem = _problem(getattr(loaded, "tokenizer", loaded), rows)
    except Exception as cause:  # tokenizers raises bare Exceptions
        raise error(f"{source}: its tokenizer cannot be used: {_why(folder, cause)}") from cause
    if problem:
        there = sorted(file.name for file in folder.glob("*") if file.suffix != ".safetensors")
        raise error(
            f"{source}: {problem}. The folder holds {', '.join(there) or 'nothing'}; a vocabulary "
            "is tokenizer.json, vocab.json with merges.txt, vocab.txt, or a .model file: copy the "
            "tokenizer's files of that model again"
        )
    return loaded


def _why(folder: Path, cause: Exception) -> str:
    pieces = sorted(folder.glob("*.model"))
    if pieces and not (folder / "tokenizer.json").is_file():
        # transformers would try it as tiktoken's next, and speak of that alone.
        return f"{pieces[0].name} is cut short or no SentencePiece model; copy it again"
    kind = "" if type(cause) is Exception else f"{type(cause).__name__}: "
    return f"{kind}{str(cause).strip() or 'no reason given'}"


def _problem(tokenizer: Any, rows: int | None) -> str | None:
    first, second = (tokenizer.encode(text) for text in UNLIKE)
    if first == second:
        return (
            f"the vocabulary is missing or of another kind: {UNLIKE[0]!r} and {UNLIKE[1]!r} get "
            f"the same tokens {first[:8]}"
        )
    # open_clip's own tokenizer has neither; some have markers past the embedding, for other models.
    ids = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else tokenizer.encoder
    markers = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    highest = max((number for token, number in ids.items() if token not in markers), default=-1)
    if rows is not None and not highest < rows <= len(ids) / LEAST_SHARE:
        return (
            f"{len(ids)} tokens with ids up to {highest}, and the text encoder has {rows} "
            "embeddings: it is the tokenizer of another model, or a part of one"
        )
    # All that call one here pad.
    if getattr(tokenizer, "pad_token", "") is None:
        return "there is no pad_token, which tokenizer_config.json names"
    lost = _unreachable(tokenizer)
    if lost > MOST_UNREACHABLE * len(ids):
        return f"{lost} of {len(ids)} tokens are made by no merge: its merges are cut short"
    return None


def _unreachable(tokenizer: Any) -> int:
    """Tokens of byte-pair encoding that no text gets, since no merge makes them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix"):
        return 0
    end = model.get("end_of_word_suffix") or ""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    made = {"".join(pair) for pair in pairs} | tokenizer.get_added_vocab().keys()
    # Single symbols need no merge, and <0x0A> is a byte.
    long = {t for t in model["vocab"] if len(t.removesuffix(end)) > 1 and not t.startswith("<0x")}
    return len(long - made)
