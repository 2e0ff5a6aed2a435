"""Which safetensors files of a folder hold a network's weights, and which holds each tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from g2rpo_ray.common.files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")
"""What weights are read from. Numbers of 8 bits mean nothing without scales, which are not read."""
INTEGER_BUFFERS = ("position_ids", "num_batches_tracked")
"""Endings of the names of whole numbers that are no weights."""
SHARD = r"-\d+-of-\d+"


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies."""

    file: Path
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]


def find_weights(
    folder: Path, stem: str, variant: str | None, error: type[Exception]
) -> dict[str, TensorPlace]:
    """Place of each tensor of a network by its name, in the layout of diffusers and transformers.

    ``<stem>.<variant>.safetensors`` or that variant's index where one of them is there, else
    ``<stem>.safetensors`` or its index: they decide, whatever else lies beside them.

    Raises:
        error: there are no such files, or several; one is missing, damaged, or holds a tensor that
            the index gives to another; weights are quantised.
    """
    found = chosen_files(folder, stem, variant) or chosen_files(folder, stem, None)
    if not found:
        raise error(_nothing_there(folder, stem, variant))
    if len(found) > 1:
        raise error(
            f"{found[0]}: {found[1].name} lies beside it, and either could be meant; remove the "
            "one that is not"
        )
    if found[0].suffix == ".safetensors":
        return read_header(found[0], error)
    index, placed = found[0], read_index(found[0], error)
    places: dict[str, TensorPlace] = {}
    for file in sorted(set(placed.values())):
        for name, place in read_header(file, error).items():
            if (named := placed.get(name, file)) != file or name in places:
                raise error(
                    f"{file}: holds {name}, which {index.name} gives to {named.name}; the files "
                    "are not of one model: fetch the folder again"
                )
            places[name] = place
    return places


def chosen_files(folder: Path, stem: str, variant: str | None) -> list[Path]:
    """The weights of a variant, or with None the plain ones: one file, or an index of shards."""
    middle = f".{variant}" if variant else ""
    names = (f"{stem}{middle}.safetensors", f"{stem}.safetensors.index{middle}.json")
    return [folder / name for name in names if (folder / name).is_file()]


def read_index(index: Path, error: type[Exception]) -> dict[str, Path]:
    """File of each tensor.

    Raises:
        error: it is no index, or a file that it names is missing.
    """
    weight_map = read_json_object(index, error).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):
        raise error(f"{index}: not an index of weights, it has no weight_map of file names")
    placed = {name: index.parent / file for name, file in weight_map.items()}
    files = set(placed.values())
    if missing := sorted(file for file in files if not file.is_file()):
        raise error(
            f"{missing[0]}: missing; {index.name} names it ({len(missing)} of {len(files)} shards "
            "are not there)"
        )
    return placed


def read_header(file: Path, error: type[Exception]) -> dict[str, TensorPlace]:
    """Place of every tensor of one file.

    Raises:
        error: the file cannot be read, or its weights are not floating point of 16 bits or more.
    """
    with open_weights(file, error) as reader:
        parts = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
        places = {
            name: TensorPlace(file, part.get_dtype(), tuple(part.get_shape()))
            for name, part in parts.items()
        }
    for name, place in places.items():
        if place.dtype not in FLOATS and not name.endswith(INTEGER_BUFFERS):
            raise error(
                f"{file}: {name} holds {place.dtype} numbers; weights must be floating point of "
                f"16 bits or more ({', '.join(FLOATS)}): quantised files cannot be used, take the "
                "model as it was published before that"
            )
    return places


def read_tensors(places: Mapping[str, TensorPlace]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, file by file."""
    by_file: dict[Path, list[str]] = {}
    for name, place in places.items():
        by_file.setdefault(place.file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as reader:
            for name in names:
                yield name, reader.get_tensor(name)


def open_weights(file: Path, error: type[Exception]) -> safe_open:
    """Raises ``error`` where the file is missing, cut short or no safetensors file."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise error(f"{file}: no such file") from None
    except (OSError, SafetensorError) as cause:
        raise error(f"{file}: cut short or no safetensors file: {cause}") from cause


def refuse_quantiser(config_file: Path, error: type[Exception]) -> None:
    """Raises ``error`` where a config.json says that its weights are quantised."""
    config = read_json_object(config_file, error)
    for key in ("quantization_config", "compression_config"):
        if (found := config.get(key)) is not None:
            method = found.get("quant_method") if isinstance(found, dict) else None
            raise error(
                f"{config_file}: {key} names the quantiser {method or json.dumps(found)!r}; "
                "quantised weights cannot be used here. Take the model as it was published before "
                "that, in bfloat16, float16 or float32"
            )


def _nothing_there(folder: Path, stem: str, variant: str | None) -> str:
    names = sorted(file.name for file in folder.glob(f"{stem}*.safetensors"))
    pattern = re.compile(rf"{re.escape(stem)}\.([\w-]+?)(?:{SHARD})?\.safetensors")
    variants = {match[1] for name in names if (match := pattern.fullmatch(name))}
    indices = folder.glob(f"{stem}.safetensors.index.*.json")
    variants |= {file.name.split(".")[-2] for file in indices}
    wanted = f"{stem}.safetensors" + (f" and no variant {variant!r}" if variant else "")
    if variants:
        one = sorted(variants)[0]
        return (
            f"{folder}: no {wanted} there, only the variants {', '.join(sorted(variants))}: choose "
            f"one by the setting model.variant={one}"
        )
    if names:
        return (
            f"{folder}: no {wanted} there, nor its index {stem}.safetensors.index.json, which says "
            f"what of {', '.join(names[:3])} holds each tensor"
        )
    return f"{folder}: no {wanted} there, nor its index {stem}.safetensors.index.json"
