"""Opening a model folder in diffusers' layout, with errors that name the part and the cause."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from g2rpo_ray.common.imports import uncollected
from g2rpo_ray.common.paths import is_shipped, resolve_path
from g2rpo_ray.common.weight_files import TensorPlace, chosen_files, find_weights
from g2rpo_ray.config import Config, ModelSection
from g2rpo_ray.models.families import check_settings, latents_of, open_family
from g2rpo_ray.models.family import Family, ModelFolderError
from g2rpo_ray.models.frozen_float8 import round_blocks
from g2rpo_ray.models.saving import WEIGHTS_NAME
from g2rpo_ray.models.tokenizers import load_part_tokenizer

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

RANDOM_STD = 0.02
"""Spread of random weights: small enough that a deep network stays finite."""


def check_model(config: Config) -> Path:
    """The folder of ``model.path``: of a family known here that has pictures of the configured
    sizes and takes the configured guidance and length of texts, with every part in place, its
    configuration usable, every weight file whole and tokenizers that tell texts apart.

    Which tensors the files hold is checked on loading.

    Raises:
        ModelFolderError: the folder or a part of it is missing, of another class or another model,
            quantised or cut short; more than one file could be meant; or the model has no pictures
            of such a size, takes no such guidance or length, or says nothing of its own schedule,
            which is asked for.
    """
    folder = resolve_path(config.model.path)
    if not folder.is_dir():
        raise ModelFolderError(f"model.path {config.model.path!r}: no such folder ({folder})")
    family = open_family(folder)
    for part in family.parts:
        if is_network(part) and not _is_random(config.model, part):
            places = part_weights(config.model, part)
            _tell_unread(folder / part, {place.file.name for place in places.values()})
        if is_shipped(folder):
            continue
        if is_network(part):
            with _named_errors(folder / part, family.parts[part]):
                _make_empty(family, part, folder / part)
        else:
            load_part_tokenizer(family, folder / part)
    latents = latents_of(config, family)
    check_settings(config, family)
    if config.sampling.schedule == "dynamic":
        family.schedule(config.sampling.steps, latents)
    return folder


def is_network(part: str) -> bool:
    """Whether a part of a folder has weights."""
    return not part.startswith("tokenizer")


def part_weights(model: ModelSection, part: str) -> dict[str, TensorPlace]:
    """Where the tensors of a part of the folder lie, by their headers.

    Raises:
        ModelFolderError: as of ``find_weights``.
    """
    folder = resolve_path(model.path) / part
    return find_weights(folder, _stem(part), model.variant, ModelFolderError)


def load_part(
    model: ModelSection, part: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Any:
    """Load one model of the folder in ``dtype``, in evaluation mode.

    With ``model.random_weights`` transformer and VAE are made on ``device`` from their config.json.
    With ``model.frozen_dtype`` the transformer is rounded on its way to ``device``.

    Raises:
        ModelFolderError: weights are missing, cut short, unexpected, or of other shapes.
    """
    family = open_family(resolve_path(model.path))
    if _is_random(model, part):
        network = _random_network(_class_of(family, part), family.configs[part], dtype, device)
        return _on_device(model, family, part, network, device)
    folder = resolve_path(model.path) / part
    if not is_network(part):
        return load_part_tokenizer(family, folder)
    cls = _class_of(family, part)
    part_weights(model, part)
    # Without use_safetensors the libraries would fall back to pickled weights.
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    options |= {"output_loading_info": True, "torch_dtype": dtype}
    if chosen_files(folder, _stem(part), model.variant):
        options["variant"] = model.variant
    if part.startswith("text_encoder"):
        # Its bar would stand between the lines of who asked for this.
        import_module("transformers.utils.logging").disable_progress_bar()
        # transformers' own error names no tensor; ours, made from the same finding, does.
        options["ignore_mismatched_sizes"] = True
    with _named_errors(folder, cls.__name__):
        network, info = cls.from_pretrained(folder, **options)
    _check_tensors(folder, cls.__name__, info)
    return _on_device(model, family, part, network.eval().requires_grad_(False), device)


def _on_device(
    model: ModelSection, family: Family, part: str, network: Any, device: torch.device | str
) -> Any:
    if part == "transformer" and model.frozen_dtype is not None:
        round_blocks(network, family.blocks, device)
    return network.to(device)


def on_meta(family: Family, part: str) -> Any:
    """``transformer`` or ``vae`` by its configuration, without weights."""
    with torch.device("meta"):
        return _class_of(family, part).from_config(family.configs[part])


def _make_empty(family: Family, part: str, folder: Path) -> None:
    """Any network by its configuration: most errors of ``from_pretrained`` come of it."""
    if part in family.configs:
        on_meta(family, part)
        return
    cls = _class_of(family, part)
    with torch.device("meta"):
        cls(cls.config_class.from_pretrained(folder, local_files_only=True))


@contextmanager
def _named_errors(folder: Path, model: str) -> Iterator[None]:
    try:
        yield
    # Whatever a configuration or file that the libraries did not expect makes them raise.
    except Exception as error:
        raise ModelFolderError(
            f"{folder}: cannot be loaded as {model}: {type(error).__name__}: {error}. Fetch or "
            "copy this part again, as it was published"
        ) from error


def _tell_unread(folder: Path, read: set[str]) -> None:
    beside = sorted({file.name for file in folder.glob("*.safetensors")} - read)
    if read and beside:
        logger.warning(
            "%s: weights are read from %s, not from %s beside it (model.variant chooses)",
            folder, ", ".join(sorted(read)[:3]), ", ".join(beside[:3]),
        )  # fmt: skip


def _is_random(model: ModelSection, part: str) -> bool:
    return model.random_weights and part in ("transformer", "vae")


def _stem(part: str) -> str:
    """How the part's library names weight files."""
    return WEIGHTS_NAME if part in ("transformer", "vae") else "model"


def _class_of(family: Family, part: str) -> Any:
    library = "diffusers" if part in ("transformer", "vae") else "transformers"
    with uncollected():
        return getattr(import_module(library), family.parts[part])


def _random_network(
    cls: Any, config: dict[str, Any], dtype: torch.dtype, device: torch.device | str
) -> Any:
    """Small random numbers in every layer, the same ones in every role on the same kind of card."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        network = cls.from_config(config).to(dtype)
    # Tables of positions are buffers: no weights, and not to be random.
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network = network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=RANDOM_STD, generator=generator)
            else:
                parameter.fill_(float(name.endswith("weight")))
    return network.eval().requires_grad_(False)


def _check_tensors(folder: Path, model: str, info: dict[str, Any]) -> None:
    # The libraries only warn, and go on with random numbers in place of what does not fit.
    reshaped = [name for name, *_ in info["mismatched_keys"]]
    # Buffers of old checkpoints, which today's classes make themselves.
    unused = [name for name in info["unexpected_keys"] if not name.endswith("position_ids")]
    for names, verb, problem in (
        (info["missing_keys"], "lack", f"of {model}: the folder is incomplete or of another model"),
        (reshaped, "hold", f"of other shapes than {model} with this config.json has"),
        (unused, "hold", f"that {model} with this config.json has no place for"),
    ):
        if names:
            raise ModelFolderError(
                f"{folder}: the weight files {verb} {len(names)} tensors {problem}; first "
                f"{', '.join(sorted(names)[:3])}"
            )
