"""Transformers and adapters in diffusers' file formats: written and compared; and read back in."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from g2rpo_ray.common.weight_files import TensorPlace, find_weights, read_header, read_tensors
from g2rpo_ray.config import LoraSection
from g2rpo_ray.models.family import Family, ModelFolderError
from g2rpo_ray.models.lora import ADAPTER
from g2rpo_ray.models.rounding import Arrived, Rounding, rounded

WEIGHTS_NAME = "diffusion_pytorch_model"
"""How diffusers' weight files begin."""
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
"""Of an adapter's tensors, in diffusers' format."""
_A, _B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def adapter_tensors(weights: Mapping[str, Tensor], lora: LoraSection) -> dict[str, Tensor]:
    """Trained adapters, float32, by diffusers' names instead of the policy's, for alpha = rank.

    The scale alpha / rank goes into B: a loader that does not know alpha is right, too.
    """
    scale = lora.alpha / lora.rank
    return {
        name.replace(f".{ADAPTER}.weight", ".weight"): t * scale if name.endswith(_B) else t.clone()
        for name, t in weights.items()
    }


@torch.no_grad()
def merge_adapters(
    transformer: Any,
    weights: Mapping[str, Tensor],
    lora: LoraSection,
    rounding: Rounding = "nearest",
    seed: int = 0,
) -> Arrived:
    """Add ``alpha / rank * B A`` to the weights of a plain transformer; the sum is float32.

    Returns:
        What is left of it in the weights.
    """
    arrived = Arrived()
    for name in weights:
        if not name.endswith(_A):
            continue
        module = name.removesuffix(_A)
        layer = transformer.get_submodule(module).weight
        delta = weights[module + _B].float() @ weights[name].float()
        before = layer.float()
        meant = before + lora.alpha / lora.rank * delta
        after = rounded(meant, layer.dtype, rounding, seed, module)
        arrived.add(before, meant, after)
        layer.copy_(after)
    return arrived


def save_transformer(transformer: Any, folder: Path, max_shard_size: str) -> None:
    """Write ``config.json`` and the weights, in shards if they are larger than one may be.

    Raises:
        ModelFolderError: what was read back differs.
    """
    transformer.save_pretrained(folder, max_shard_size=max_shard_size)
    _compare(folder, transformer.state_dict(), read_tensors(transformer_places(folder, None)))


def save_adapter(tensors: Mapping[str, Tensor], family: Family, folder: Path) -> None:
    """Write an adapter as the pipeline's ``load_lora_weights`` takes it.

    Raises:
        ModelFolderError: what diffusers reads back differs.
    """
    pipeline = family.pipeline_class
    pipeline.save_lora_weights(folder, transformer_lora_layers=dict(tensors))
    read = pipeline.lora_state_dict(folder, weight_name=ADAPTER_FILE, local_files_only=True)
    _compare(folder, tensors, ((name.removeprefix(PREFIX), t) for name, t in read.items()))


def save_named(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write an adapter by the names that it has.

    Raises:
        ModelFolderError: what was read back differs.
    """
    save_file(dict(tensors), file, {"format": "pt"})
    _compare(file.parent, tensors, read_tensors(read_header(file, ModelFolderError)))


def transformer_places(path: Path, variant: str | None) -> dict[str, TensorPlace]:
    """Where a transformer's tensors lie: in the file ``path``, or in it or its ``transformer/``.

    Raises:
        ModelFolderError: there are none, or it is not clear which; as of ``find_weights``.
    """
    if path.is_file():
        return read_header(path, ModelFolderError)
    if not path.is_dir():
        raise ModelFolderError(f"{path}: no such file or folder")
    inner = path / "transformer"
    folder = inner if inner.is_dir() and not any(path.glob(f"{WEIGHTS_NAME}*")) else path
    return find_weights(folder, WEIGHTS_NAME, variant, ModelFolderError)


@torch.no_grad()
def load_transformer_weights(transformer: Any, path: Path, variant: str | None = None) -> None:
    """Fill a transformer from weight files, as diffusers or the published G2RPO weights have them.

    Raises:
        ModelFolderError: a file cannot be read, or its tensors are not this transformer's.
    """
    places = transformer_places(path, variant)
    weights = dict(transformer.state_dict(keep_vars=True))
    wanted = {(name, tuple(weight.shape)) for name, weight in weights.items()}
    found = {(name, place.shape) for name, place in places.items()}
    if not weights.keys() & places.keys():
        raise ModelFolderError(
            f"{path}: names its tensors otherwise than {type(transformer).__name__} does, first "
            f"{min(places, default='none')}; what has the names of the model's authors or of "
            "ComfyUI is turned into diffusers' by from_single_file and save_pretrained"
        )
    if wrong := sorted({name for name, _ in wanted ^ found}):
        raise ModelFolderError(
            f"{path}: {len(wrong)} tensors are missing, unknown or of another shape than in the "
            f"model of model.path, first {', '.join(wrong[:3])}"
        )
    for name, tensor in read_tensors(places):
        weights[name].copy_(tensor)


def _compare(
    folder: Path, expected: Mapping[str, Tensor], found: Iterable[tuple[str, Tensor]]
) -> None:
    missing, wrong = set(expected), []
    for name, tensor in found:
        missing.discard(name)
        if name not in expected or not torch.equal(expected[name].cpu(), tensor):
            wrong.append(name)
    if wrong := sorted([*wrong, *missing]):
        raise ModelFolderError(
            f"{folder}: {len(wrong)} tensors differ when read back, first {', '.join(wrong[:3])}"
        )
