"""Adapters by the names of other programs: ComfyUI, kohya's sd-scripts, peft; and back.

ComfyUI and sd-scripts keep the networks of the models' authors, some of whose layers diffusers has
apart: ``Family.joined`` is the one table of them. Alpha is always the rank: no loader scales.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from g2rpo_ray.models.family import Family, ModelFolderError

Format = Literal["diffusers", "comfyui", "kohya", "peft"]
FORMATS: tuple[Format, ...] = get_args(Format)
PEFT_PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


def check_format(family: Family, form: Format) -> None:
    """Raises ModelFolderError where the program of ``form`` does not know the family."""
    if form == "kohya" and not family.in_sd_scripts:
        raise ModelFolderError(
            "--format kohya: kohya's sd-scripts has no model of diffusers' "
            f"{family.pipeline}; allowed here: {', '.join(f for f in FORMATS if f != form)}"
        )


def named_for(
    form: Format, tensors: Mapping[str, Tensor], transformer: nn.Module, family: Family
) -> dict[str, Tensor]:
    """An adapter in the names of ``form``, equal in every layer.

    Adapters of layers that the authors join are one of all their ranks: A is stacked, B has each
    part's rows in columns of its own, and none where a part has no adapter.

    Args:
        tensors: as of ``adapter_tensors``.
        transformer: plain; on the meta device is enough.

    Raises:
        ModelFolderError: ``form`` has no name for a layer, or for the family.
    """
    check_format(family, form)
    if form in ("diffusers", "peft"):
        prefix = PEFT_PREFIX if form == "peft" else ""
        return {prefix + name: tensor for name, tensor in tensors.items()}
    adapted = {name.removesuffix(A).removesuffix(B) for name in tensors}
    joined = joined_layers(family, _linear(transformer))
    if lost := sorted(adapted.difference(*joined.values())):
        raise ModelFolderError(
            f"--format {form}: {len(lost)} of {len(adapted)} adapted layers have no place there, "
            f"first {lost[0]}; --format diffusers holds all"
        )
    found = {}
    for name, parts in joined.items():
        if not (held := [part for part in parts if part in adapted]):
            continue
        down = torch.cat([tensors[part + A] for part in held])
        rows = [
            tensors[part + B] if part in adapted else down.new_zeros(_rows(transformer, part), 0)
            for part in parts
        ]
        key = f"diffusion_model.{name}" if form == "comfyui" else f"lora_unet_{_flat(name)}"
        found[f"{key}.lora_down.weight"] = down
        found[f"{key}.lora_up.weight"] = torch.block_diag(*rows)
        found[f"{key}.alpha"] = torch.tensor(float(len(down)))
    return found


def divided(
    pairs: Mapping[str, tuple[Tensor, Tensor]], transformer: nn.Module, family: Family
) -> dict[str, Tensor] | None:
    """Both factors by the transformer's own names.

    Args:
        pairs: A and B by the authors' names of layers, with points or without.

    Returns:
        None where a name or a shape is not of ``Family.joined``.
    """
    joined = joined_layers(family, _linear(transformer))
    parts_of = {_flat(name): parts for name, parts in joined.items()}
    found: dict[str, Tensor] = {}
    for module, (down, up) in pairs.items():
        parts = parts_of.get(_flat(module), ())
        sizes = [_rows(transformer, part) for part in parts]
        if not parts or len(up) != sum(sizes):
            return None
        for part, rows in zip(parts, up.split(sizes), strict=True):
            # What was joined from several adapters comes apart again.
            used = rows.any(dim=0) if up.any() else torch.ones(len(down), dtype=torch.bool)
            if part + A in found:
                return None
            if used.any():
                found[part + A], found[part + B] = down[used], rows[:, used].contiguous()
    return found


def joined_layers(family: Family, layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """``Family.joined`` with the numbers of the blocks that there are."""
    found = {}
    for joined, parts in family.joined.items():
        first = re.compile(re.escape(parts[0]).replace(r"\{\}", r"(\d+)"))
        for number in (match[1] for match in map(first.fullmatch, layers) if match):
            found[joined.format(number)] = tuple(part.format(number) for part in parts)
    return found


def peft_settings(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter in peft's names."""
    ranks = {
        name.removeprefix(PEFT_PREFIX).removesuffix(A): len(tensor)
        for name, tensor in tensors.items()
        if name.endswith(A)
    }
    rank = max(ranks.values())
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(ranks)}


def _linear(transformer: nn.Module) -> list[str]:
    return [name for name, m in transformer.named_modules() if isinstance(m, nn.Linear)]


def _rows(transformer: Any, layer: str) -> int:
    return len(transformer.get_submodule(layer).weight)


def _flat(name: str) -> str:
    return name.replace(".", "_")
