"""Models of transformers in local folders, refused where a file is missing or damaged."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.tokenizers import load_tokenizer
from g2rpo_ray.common.weight_files import chosen_files, find_weights, refuse_quantiser
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.scorers.checkpoint_file import (
    load_state_dict,
    refuse_misfits,
    refuse_quantised,
)

PICKLED = "pytorch_model.bin"
NEEDED = ("config.json", "preprocessor_config.json", "tokenizer_config.json")


def read_tokenizer(folder: Path, model_class: str) -> Any:
    """The tokenizer of a model of texts and pictures.

    Args:
        model_class: its class in transformers, such as ``CLIPModel``.

    Raises:
        ScorerError: the folder lacks a file, holds another kind of model, or its tokenizer cannot
            be used.
    """
    import transformers

    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise ScorerError(f"{folder}: no {', '.join(missing)} in it (or no such folder)")
    config = read_json_object(folder / "config.json", ScorerError)
    config_class = getattr(transformers, model_class).config_class
    if config.get("model_type") != config_class.model_type:
        raise ScorerError(
            f"{folder}/config.json: model_type is not {config_class.model_type!r}, as a "
            f"{model_class}'s is"
        )
    try:
        rows = config_class.from_dict(config).text_config.vocab_size
    except Exception as error:  # whatever a setting of another kind makes transformers raise
        raise ScorerError(f"{folder}/config.json: no {model_class}'s: {error}") from error
    read = partial(transformers.AutoTokenizer.from_pretrained, folder, local_files_only=True)
    return load_tokenizer(read, folder, rows, ScorerError)


def check_pretrained(folder: Path) -> None:
    """Look at a model's weights without reading them.

    Raises:
        ScorerError: they are missing, damaged or quantised.
    """
    refuse_quantiser(folder / "config.json", ScorerError)
    if (folder / PICKLED).is_file() and not chosen_files(folder, "model", None):
        refuse_quantised(folder / PICKLED, load_state_dict(folder / PICKLED, "meta"))
    else:
        find_weights(folder, "model", None, ScorerError)


def load_pretrained(folder: Path, model_class: str) -> Any:
    """A model with the folder's weights, in float32 on the CPU.

    Raises:
        ScorerError: weights are missing, left over, damaged or quantised.
    """
    import transformers

    check_pretrained(folder)
    try:
        model, info = getattr(transformers, model_class).from_pretrained(
            folder, local_files_only=True, output_loading_info=True, dtype=torch.float32
        )
    # Whatever a configuration or file that transformers did not expect makes it raise.
    except Exception as error:
        raise ScorerError(
            f"{folder}: cannot be loaded as a {model_class}: {type(error).__name__}: {error}"
        ) from error
    refuse_misfits(folder, missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    return model.eval()
