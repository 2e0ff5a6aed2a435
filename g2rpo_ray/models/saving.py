"""Transformers and adapters in diffusers' file formats: written, compared, and read back in."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.config import LoraSection
from g2rpo_ray.models.family import Family, ModelFolderError
from g2rpo_ray.models.lora import ADAPTER
from g2rpo_ray.models.rounding import Arrived, Rounding, rounded

TRANSFORMER_FILES = "diffusion_pytorch_model*.safetensors"
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
"""Of an adapter's tensors, in diffusers' format."""
_A, _B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def adapter_tensors(weights: Mapping[str, Tensor], lora: LoraSection) -> dict[str, Tensor]:
    """Trained adapters by diffusers' names, for alpha = rank.

    The scale alpha / rank goes into B: a loader that does not know alpha is right, too.

    Args:
        weights: float32, by their names in the policy.
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
    _compare(folder, transformer.state_dict(), _read_files(transformer_files(folder)))


def save_adapter(tensors: Mapping[str, Tensor], family: Family, folder: Path) -> None:
    """Write an adapter as the pipeline's ``load_lora_weights`` takes it.

    Raises:
        ModelFolderError: what diffusers reads back differs.
    """
    pipeline = family.pipeline_class
    pipeline.save_lora_weights(folder, transformer_lora_layers=dict(tensors))
    read = pipeline.lora_state_dict(folder, weight_name=ADAPTER_FILE, local_files_only=True)
    _compare(folder, tensors, ((name.removeprefix(PREFIX), t) for name, t in read.items()))


def transformer_files(path: Path) -> list[Path]:
    """Weight files of a transformer: ``path`` itself, or those in it or its ``transformer/``.

    Raises:
        ModelFolderError: there are none, or one that the index names is missing.
    """
    if path.is_file():
        return [path]
    for folder in (path, path / "transformer"):
        files = sorted(folder.glob(TRANSFORMER_FILES))
        index = folder / "diffusion_pytorch_model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json_object(index, ModelFolderError).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelFolderError(f"{index}: not an index of weights, it has no weight_map")
            wanted = {folder / name for name in weight_map.values()}
            if missing := sorted(wanted - set(files)):
                raise ModelFolderError(f"{missing[0]}: missing; {index.name} names it")
            files = sorted(wanted)
        if files:
            return files
    raise ModelFolderError(f"{path}: no {TRANSFORMER_FILES} there, nor in its transformer/")


@torch.no_grad()
def load_transformer_weights(transformer: Any, path: Path) -> None:
    """Fill a transformer from weight files, as diffusers or the published G2RPO weights have them.

    Raises:
        ModelFolderError: a file cannot be read, or its tensors are not this transformer's.
    """
    files = transformer_files(path)
    places = dict(transformer.state_dict(keep_vars=True))
    wanted = {(name, tuple(place.shape)) for name, place in places.items()}
    found = {named_shape for file in files for named_shape in _shapes(file)}
    if wrong := sorted({name for name, _ in wanted ^ found}):
        raise ModelFolderError(
            f"{path}: {len(wrong)} tensors are missing, unknown or of another shape than in the "
            f"model of model.path, first {', '.join(wrong[:3])}"
        )
    for name, tensor in _read_files(files):
        places[name].copy_(tensor)


def load_adapter(transformer: Any, path: Path) -> None:
    """Inject an adapter that ``save_adapter``, or another program in diffusers' format, wrote.

    Raises:
        ModelFolderError: the file cannot be read, is made for other modules, or would bind in part.
    """
    file = path / ADAPTER_FILE if path.is_dir() else path
    names = {name for name, _ in _shapes(file)}
    modules = {
        name.removeprefix(PREFIX).partition(".lora_")[0] for name in names if ".lora_" in name
    }
    known = {name for name, _ in transformer.named_modules()}
    unknown = sorted(modules - known)
    if unknown or not modules:
        raise ModelFolderError(
            f"{file}: {len(unknown)} of {len(modules)} adapted modules are not in this "
            f"transformer{', first ' + unknown[0] if unknown else ''}; it belongs to another model"
        )
    # diffusers passes over what has another name, and leaves a missing half as it is: random.
    wanted = {f"{PREFIX}{module}.lora_{half}.weight" for module in modules for half in "AB"}
    if wrong := sorted(names ^ wanted):
        raise ModelFolderError(
            f"{file}: {len(wrong)} tensors are missing or would not be used, first "
            f"{', '.join(wrong[:3])}; an adapter in diffusers' format has "
            f"{PREFIX}<module>.lora_A.weight and lora_B.weight of every module, and nothing else"
        )
    try:
        transformer.load_lora_adapter(str(file.parent), weight_name=file.name, use_safetensors=True)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ModelFolderError(f"{file}: does not fit this transformer: {error}") from error


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


def _read_files(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with open_weights(file) as reader:
            for name in reader.keys():  # noqa: SIM118  (no mapping)
                yield name, reader.get_tensor(name)


def _shapes(file: Path) -> list[tuple[str, tuple[int, ...]]]:
    with open_weights(file) as reader:
        slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
        for name, part in slices.items():
            if not part.get_dtype().startswith(("F", "BF")):
                raise ModelFolderError(
                    f"{file}: {name} holds {part.get_dtype()} numbers; weights must be floating "
                    "point (quantised files cannot be used)"
                )
        return [(name, tuple(part.get_shape())) for name, part in slices.items()]


def open_weights(file: Path) -> safe_open:
    """
    Raises:
        ModelFolderError: the file is missing, cut short or no safetensors file.
    """
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ModelFolderError(f"{file}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{file}: cut short or no safetensors file: {error}") from error
