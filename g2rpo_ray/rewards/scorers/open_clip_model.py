"""Loading an open_clip model from local files, never from the hub, with nothing guessed."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.imports import uncollected
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.tokenizers import load_tokenizer
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict, load_weights
from g2rpo_ray.rewards.scorers.clip_features import DTYPES, ClipFeatures
from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess

LOCAL_DIR, CONFIG = "local-dir:", "open_clip_config.json"
CLIP_VOCABULARY = 49408
OWN_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""What open_clip calls the weights in a model's folder."""


def _own_preprocess(model: Any) -> ClipPreprocess:
    return ClipPreprocess.of_open_clip(model.visual.preprocess_cfg)


def load_clip_features(
    architecture: str,
    checkpoint: str | None,
    device: str,
    dtype: str,
    preprocess_of: Callable[[Any], Callable[[Tensor], Tensor]] = _own_preprocess,
) -> ClipFeatures:
    """Features of an open_clip model.

    Args:
        architecture: ``local-dir:FOLDER`` with open_clip_config.json, or an open_clip name.
        checkpoint: weights file; None takes the folder's own.
        preprocess_of: model -> its preprocessing; open_clip's own by default.

    Raises:
        ScorerError: a file is missing or does not fit, or open_clip knows no such model.
    """
    with uncollected():
        import open_clip

    name, weights, tokenizer = find_open_clip(architecture, checkpoint)
    state = load_state_dict(weights)
    # Not with its weights: where a folder has none, open_clip goes on with random ones.
    logging.getLogger().addFilter(_is_no_false_alarm)
    try:
        model = open_clip.create_model(name, load_weights=False)
    finally:
        logging.getLogger().removeFilter(_is_no_false_alarm)
    load_weights(model, state, weights)
    model = model.to(device, DTYPES[dtype]).eval()

    def encode_text(prompt: str) -> Tensor:
        features: Tensor = model.encode_text(tokenizer([prompt]).to(device))[0]
        return features

    return ClipFeatures(
        model.encode_image, encode_text, preprocess_of(model), torch.device(device), DTYPES[dtype]
    )


def find_open_clip(architecture: str, checkpoint: str | None) -> tuple[str, Path, Any]:
    """Name as open_clip wants it, weights file and tokenizer of ``load_clip_features``.

    Raises:
        ScorerError: one of them is missing or cannot be used, the weights by their names alone.
    """
    import open_clip

    name = resolve_architecture(architecture)
    weights = _weights_of(name, checkpoint)
    load_state_dict(weights, "meta")
    folder = name.removeprefix(LOCAL_DIR)
    if folder == name:
        text = open_clip.get_model_config(name)["text_cfg"]
    else:
        text = read_json_object(Path(folder, CONFIG), ScorerError)["model_cfg"]["text_cfg"]
    # A text tower of transformers has its own size; open_clip's own has CLIP's, if not told.
    rows = None if "hf_model_name" in text else text.get("vocab_size", CLIP_VOCABULARY)
    tokenizer = load_tokenizer(partial(open_clip.get_tokenizer, name), folder, rows, ScorerError)
    return name, weights, tokenizer


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    # The model gets its weights right after; a replica's log is no place for such a warning.
    told = record.getMessage()
    return "Model initialized randomly" not in told and "no CLIP weights found" not in told


def resolve_architecture(architecture: str) -> str:
    """An open_clip model name as open_clip wants it, with the folder of ``local-dir:`` resolved.

    Raises:
        ScorerError: no such folder, its configuration is missing, or the name is unknown.
    """
    import open_clip

    if not architecture.startswith(LOCAL_DIR):
        if architecture not in open_clip.list_models():
            raise ScorerError(
                f"open_clip knows no model {architecture!r}; give one of its names (ViT-H-14, ...) "
                f"or {LOCAL_DIR}FOLDER with an open_clip_config.json"
            )
        return architecture
    folder = resolve_path(architecture.removeprefix(LOCAL_DIR))
    # Without the file open_clip would go on with a default, and with other preprocessing.
    config_file = folder / CONFIG
    if not config_file.is_file():
        raise ScorerError(f"{folder}: no {CONFIG} in it (or no such folder)")
    config = read_json_object(config_file, ScorerError)
    model_keys = ["embed_dim", "vision_cfg", "text_cfg"]
    for section, keys in (("model_cfg", model_keys), ("preprocess_cfg", ["mean", "std"])):
        found = config.get(section)
        missing = (
            keys if not isinstance(found, dict) else [key for key in keys if not found.get(key)]
        )
        if missing:
            raise ScorerError(f"{config_file}: {section} lacks {', '.join(missing)}")
    return f"{LOCAL_DIR}{folder}"


def _weights_of(name: str, checkpoint: str | None) -> Path:
    if checkpoint is not None:
        weights = resolve_path(checkpoint)
        if not weights.is_file():
            raise ScorerError(f"{weights}: no such checkpoint file")
        return weights
    if not name.startswith(LOCAL_DIR):
        raise ScorerError(f"with architecture {name!r} the option 'checkpoint' must name a file")
    folder = Path(name.removeprefix(LOCAL_DIR))
    for file in OWN_WEIGHTS:
        if (folder / file).is_file():
            return folder / file
    raise ScorerError(f"{folder}: no weights in it; expected one of {', '.join(OWN_WEIGHTS)}")
