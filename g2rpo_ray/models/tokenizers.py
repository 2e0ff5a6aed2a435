"""The tokenizers of a model folder, fitting the text encoders that they belong to."""

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any

from g2rpo_ray.common.tokenizers import load_tokenizer
from g2rpo_ray.models.family import Family, ModelFolderError


def load_part_tokenizer(family: Family, folder: Path) -> Any:
    """Tokenizer or processor of one ``tokenizer...`` part, for the encoder ``text_encoder...``.

    Raises:
        ModelFolderError: as of ``load_tokenizer``; or what the pipeline needs of it is missing.
    """
    import transformers

    encoder = folder.with_name(folder.name.replace("tokenizer", "text_encoder"))
    try:
        network = getattr(transformers, family.parts[encoder.name])
        whole = network.config_class.from_pretrained(encoder, local_files_only=True)
        config = whole.get_text_config()
    except Exception as error:  # whatever a file of another kind makes the library raise
        raise ModelFolderError(f"{encoder}/config.json cannot be read: {error}") from error
    cls = getattr(transformers, family.parts[folder.name])
    read = partial(cls.from_pretrained, folder, local_files_only=True)
    loaded = load_tokenizer(read, folder, config.vocab_size, ModelFolderError)
    # Only CLIP has an embedding for each place, and the pipelines pad to the tokenizer's length.
    length = getattr(loaded, "model_max_length", 0)
    if config.model_type == "clip_text_model" and length > config.max_position_embeddings:
        raise ModelFolderError(
            f"{folder}/tokenizer_config.json: model_max_length is {length:g}, and {encoder.name} "
            f"takes {config.max_position_embeddings} tokens; copy that file again"
        )
    source = inspect.getsource(sys.modules[family.pipeline_class.__module__])
    if "apply_chat_template" in source and not loaded.chat_template:
        raise ModelFolderError(
            f"{folder}: no chat template, which a {family.pipeline} puts prompts into; copy "
            "chat_template.jinja (or the tokenizer_config.json that holds it) again"
        )
    return loaded
