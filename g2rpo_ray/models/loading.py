"""Opening a model folder in diffusers' layout, with errors that name the part and the cause."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from safetensors import SafetensorError, safe_open
from transformers import CLIPTextModel, CLIPTokenizerFast, T5EncoderModel, T5TokenizerFast

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import ModelSection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

PARTS = {
    "transformer": FluxTransformer2DModel,
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": T5EncoderModel,
    "tokenizer": CLIPTokenizerFast,
    "tokenizer_2": T5TokenizerFast,
}
RANDOM_STD = 0.02
"""Spread of random weights: small enough that a deep network stays finite."""
_CONFIG_FILES = {
    "text_encoder": "config.json",
    "text_encoder_2": "config.json",
    "transformer": "config.json",
    "vae": "config.json",
    "tokenizer": "tokenizer_config.json",
    "tokenizer_2": "tokenizer_config.json",
}


class ModelFolderError(InputError):
    """A model folder is missing, incomplete or does not fit; the message names part and cause."""


def check_model_folder(model: ModelSection) -> Path:
    """The folder of ``model.path``, with every part in place, transformer and VAE of the same
    latents, and every weight file whole.

    Which tensors the files hold is checked on loading.

    Raises:
        ModelFolderError: the folder or a part of it is missing, of another class or another model,
            or cut short.
    """
    folder = resolve_path(model.path)
    index_file = folder / "model_index.json"
    if not folder.is_dir():
        raise ModelFolderError(f"model.path {model.path!r}: no such folder ({folder})")
    if not index_file.is_file():
        raise ModelFolderError(
            f"{folder}: no model_index.json; expected a folder in diffusers' layout, as "
            "FluxPipeline.save_pretrained writes it"
        )
    index = _read_json(index_file)
    for part, expected in PARTS.items():
        if not (folder / part / _CONFIG_FILES[part]).is_file():
            raise ModelFolderError(
                f"{folder}: part '{part}' is missing ({part}/{_CONFIG_FILES[part]} not found); "
                f"needed parts: {', '.join(PARTS)}"
            )
        entry = index.get(part)
        found = entry[-1] if isinstance(entry, list) and entry else None
        if not part.startswith("tokenizer") and found != expected.__name__:
            raise ModelFolderError(
                f"{index_file}: part '{part}' is a {found or 'missing entry'}; this system trains "
                f"FLUX-type models, whose {part} is a {expected.__name__}"
            )
        for file in sorted((folder / part).glob("*.safetensors")):
            _check_whole(file)
    packed_channels(folder)
    return folder


def packed_channels(folder: Path) -> int:
    """Channels of a token: the 2 x 2 latents of the VAE that the transformer takes and predicts.

    Raises:
        ModelFolderError: they differ.
    """
    network_file, vae_file = (folder / part / "config.json" for part in ("transformer", "vae"))
    network, vae = _read_json(network_file), _read_json(vae_file)
    # What a file leaves out has diffusers' default.
    taken, latent = network.get("in_channels", 64), vae.get("latent_channels", 4)
    predicted = taken if network.get("out_channels") is None else network["out_channels"]
    if not taken == predicted == 4 * latent:
        raise ModelFolderError(
            f"{network_file}: the transformer takes in_channels {taken} and predicts out_channels "
            f"{predicted}; {vae_file} has latent_channels {latent}, packed 4 x {latent} = "
            f"{4 * latent}. All three must be equal: a FLUX with further inputs (Fill, Control) "
            "or another model's VAE cannot be trained here"
        )
    return 4 * latent


def load_part(
    model: ModelSection, part: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Any:
    """Load one model of the folder in ``dtype``, in evaluation mode.

    With ``model.random_weights`` transformer and VAE are made on ``device`` from their config.json.

    Raises:
        ModelFolderError: weights are missing, cut short, unexpected, or of other shapes.
    """
    folder = resolve_path(model.path) / part
    cls = PARTS[part]
    if model.random_weights and part in ("transformer", "vae"):
        return _random_network(cls, _read_json(folder / "config.json"), dtype, device)
    is_network = not part.startswith("tokenizer")
    # Without use_safetensors the libraries would fall back to pickled weights.
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}
    if part.startswith("text_encoder"):
        # transformers' own error names no tensor; ours, made from the same finding, does.
        options["ignore_mismatched_sizes"] = True
    try:
        loaded = cls.from_pretrained(
            folder,
            local_files_only=True,
            **(options | {"torch_dtype": dtype} if is_network else {}),
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelFolderError(f"{folder}: cannot be loaded as {cls.__name__}: {error}") from error
    if not is_network:
        return loaded
    network, info = loaded
    _check_tensors(folder, cls.__name__, info)
    return network.eval().requires_grad_(False).to(device)


def _random_network(
    cls: Any, config: dict[str, Any], dtype: torch.dtype, device: torch.device | str
) -> Any:
    """Small random numbers in every layer, the same ones in every role on the same kind of card."""
    with torch.device("meta"):
        network = cls.from_config(config)
    network = network.to(dtype).to_empty(device=device)
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
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelFolderError(
            f"{folder}: the weight files lack {len(missing)} tensors of {model}, first "
            f"{', '.join(missing[:3])}; the folder is incomplete or of another model"
        )
    reshaped = sorted(name for name, *_ in info["mismatched_keys"])
    if reshaped:
        raise ModelFolderError(
            f"{folder}: the weight files hold {len(reshaped)} tensors of other shapes than "
            f"{model} with this config.json has, first {', '.join(reshaped[:3])}"
        )
    # Buffers of old checkpoints, which today's classes make themselves.
    unused = sorted(name for name in info["unexpected_keys"] if not name.endswith("position_ids"))
    if unused:
        raise ModelFolderError(
            f"{folder}: the weight files hold {len(unused)} tensors that {model} with this "
            f"config.json has no place for, first {', '.join(unused[:3])}"
        )


def _check_whole(file: Path) -> None:
    try:
        # Reads the header alone, and compares it with the file's length.
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{file}: cut short or no safetensors file: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, ModelFolderError)
