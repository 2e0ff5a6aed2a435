"""Adapters of other programs: found by what a file holds, and taken where the result is exact."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.weight_files import open_weights, read_header, read_tensors
from g2rpo_ray.models.family import Family, ModelFolderError
from g2rpo_ray.models.formats import PEFT_PREFIX as _PEFT
from g2rpo_ray.models.formats import A as _A
from g2rpo_ray.models.formats import B as _B
from g2rpo_ray.models.formats import divided
from g2rpo_ray.models.lora import ADAPTER
from g2rpo_ray.models.saving import ADAPTER_FILE, WEIGHTS_NAME

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_HALF = re.compile(
    r"(.+?)\.(?:(lora_A|lora_down|lora\.down|down)|(lora_B|lora_up|lora\.up|up))"
    rf"(?:\.{ADAPTER})?\.weight"
)
"""Module, and which half it is, in the name of any program's tensor."""
_CONVERTED = (
    (".lora_down.weight", ".lora_up.weight"), (_A, _B), (".down.weight", ".up.weight"),
    (".lora.down.weight", ".lora.up.weight"),
)  # fmt: skip
"""Both halves, as the converters of diffusers look for them."""
_OF_ADAPTERS = re.compile(r"lora|lokr_|hada_|oft_|dora_scale")
_TEXT_ENCODER = re.compile(r"(base_model\.model\.)?(lora_te|text_encoder)")
_PREFIXES = re.compile(r"(base_model\.model\.)?(model\.)?(transformer\.|diffusion_model\.)?")
"""Before the names of the transformer's own modules: peft's, ComfyUI's, diffusers'."""
_LAST_MODULATION = re.compile(r"final_layer[._]adaLN_modulation[._]1$")
_OTHER_KINDS = {
    "lokr_": "LoKr", "hada_": "LoHa", "oft_": "OFT", "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA", ".diff": "whole differences of weights beside LoRA",
    "lora_mid": "LoCon of three factors", "bias": "LoRA with biases",
}  # fmt: skip
EXACT_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Of peft's init_lora_weights, those that leave the base model's weights as they are."""


def adapter_at(path: Path) -> Path | None:
    """The file of the adapter that ``path`` is or has in it; None if it has none.

    Raises:
        ModelFolderError: a file is damaged, or more than one thing could be meant.
    """
    if path.is_file():
        return path if _is_adapter(path) else None
    adapters = [
        file
        for file in sorted(path.glob("*.safetensors"))
        if not file.name.startswith(WEIGHTS_NAME) and _is_adapter(file)
    ]
    adapters = [f for f in adapters if f.name in (ADAPTER_FILE, PEFT_FILE)] or adapters
    others = [*path.glob(f"{WEIGHTS_NAME}*.safetensors")]
    if len(adapters) > 1 or (adapters and others):
        names = ", ".join(file.name for file in [*adapters, *others][:4])
        raise ModelFolderError(f"{path}: more than one thing could be meant; name one of {names}")
    return adapters[0] if adapters else None


def load_adapter(transformer: Any, path: Path, family: Family) -> None:
    """Inject an adapter in the names of diffusers, peft, kohya or ComfyUI, at its own scale.

    Raises:
        ModelFolderError: the file cannot be read, is made for other modules, or could not be taken
            whole and exactly.
    """
    file = adapter_at(path)
    if file is None:
        raise ModelFolderError(f"{path}: no adapter there")
    pairs = _scaled(file, _halves(file))
    weights = _renamed(transformer, family, file, pairs)
    modules = dict(transformer.named_modules())
    for module in sorted({name.removesuffix(_A).removesuffix(_B) for name in weights}):
        down, up = weights[module + _A], weights[module + _B]
        layer = modules[module]
        if (up.shape[0], down.shape[1]) != tuple(layer.weight.shape) or len(down) != up.shape[1]:
            raise ModelFolderError(
                f"{file}: {module} has factors {list(up.shape)} and {list(down.shape)}, this "
                f"transformer's layer is {list(layer.weight.shape)}; it belongs to another model"
            )
    try:
        transformer.load_lora_adapter(dict(weights), prefix=None, adapter_name=ADAPTER)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelFolderError(f"{file}: does not fit this transformer: {error}") from error
    _check_bound(transformer, weights, file)


def _is_adapter(file: Path) -> bool:
    with open_weights(file, ModelFolderError) as reader:
        return any(_OF_ADAPTERS.search(name) for name in reader.keys())  # noqa: SIM118


def _halves(file: Path) -> dict[str, dict[str, Tensor]]:
    """``A [rank, in]``, ``B [out, rank]`` and, where the file has one, ``alpha`` of every module,
    by the file's own names."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensors(read_header(file, ModelFolderError)):
        if _TEXT_ENCODER.match(name):
            raise ModelFolderError(
                f"{file}: {name} adapts a text encoder, too; only adapters of the transformer "
                "alone can be taken here"
            )
        if name.endswith(".alpha"):
            found.setdefault(name.removesuffix(".alpha"), {})["alpha"] = tensor
        elif (match := _HALF.fullmatch(name)) and tensor.ndim == 2:
            found.setdefault(match[1], {})["A" if match[2] else "B"] = tensor
        else:
            kinds = (kind for part, kind in _OTHER_KINDS.items() if part in name)
            raise ModelFolderError(
                f"{file}: {name} is of {next(kinds, 'an unknown kind')}; known is LoRA: two "
                "factors of every layer, and its alpha"
            )
    if halves := sorted(module for module, parts in found.items() if not {"A", "B"} <= set(parts)):
        raise ModelFolderError(
            f"{file}: {len(halves)} modules lack a factor, first {halves[0]}: the file is not whole"
        )
    return found


def _scaled(file: Path, pairs: dict[str, dict[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Both factors of every module; where it is not 1, its scale is in B, which is float32 then."""
    is_pefts = any(module.startswith(_PEFT) for module in pairs)
    config = _peft_config(file, is_pefts or file.name == PEFT_FILE)
    scaled = {}
    for module, parts in pairs.items():
        down, up, rank = parts["A"], parts["B"], len(parts["A"])
        scale = 1.0
        if "alpha" in parts:
            scale = parts["alpha"].item() / rank
        elif config:
            from peft.utils.other import get_pattern_key

            pattern = config.get("alpha_pattern") or {}
            plain = _PREFIXES.sub("", module, count=1)
            alpha = pattern.get(get_pattern_key(pattern, plain), config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        elif is_pefts:
            raise ModelFolderError(
                f"{file}: has the names of peft, which keeps the scale (lora_alpha) in "
                f"{PEFT_CONFIG}; put that file beside it"
            )
        scaled[module] = (down, up if scale == 1 else up.float() * scale)
    return scaled


def _peft_config(file: Path, is_pefts: bool) -> dict[str, Any]:
    """peft's settings beside its file, or those that diffusers keeps in the header; or nothing."""
    source = file.with_name(PEFT_CONFIG)
    if is_pefts and source.is_file():
        config = read_json_object(source, ModelFolderError)
    else:
        with open_weights(file, ModelFolderError) as reader:
            kept = (reader.metadata() or {}).get("lora_adapter_metadata")
        source = file
        try:
            entries = json.loads(kept or "{}").items()
        except (ValueError, AttributeError) as error:
            raise ModelFolderError(
                f"{file}: lora_adapter_metadata is no object: {error}"
            ) from error
        config = {name.removeprefix("transformer."): value for name, value in entries}
    if not config:
        return {}
    if not isinstance(config.get("lora_alpha"), int | float):
        raise ModelFolderError(f"{source}: no number lora_alpha in the settings of the adapter")
    wrong = {
        "peft_type": config.get("peft_type", "LORA") != "LORA",
        "use_dora": bool(config.get("use_dora")),
        "init_lora_weights": config.get("init_lora_weights") not in EXACT_STARTS,
    }
    for key in (key for key, is_wrong in wrong.items() if is_wrong):
        raise ModelFolderError(
            f"{source}: {key} is {config[key]!r}; known is LoRA that leaves the base model's "
            "weights as they are"
        )
    return config


def _renamed(
    transformer: Any, family: Family, file: Path, pairs: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Both factors by the transformer's own names.

    Names that only stand differently are matched, those of the model's authors divided; what is not
    in the family's table goes through the converter of its pipeline.
    """
    known = {name for name, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)}
    flat = {name.replace(".", "_"): name for name in known}
    own: dict[str, str] = {}
    short: dict[str, tuple[Tensor, Tensor]] = {}
    for module, factors in pairs.items():
        plain = _PREFIXES.sub("", module, count=1)
        name = re.sub(r"^lora_(unet|transformer)_", "", plain).replace(".", "_")
        own[module] = plain if plain in known else flat.get(name, "")
        short[name] = factors
    if all(own.values()) and len(set(own.values())) == len(own):
        return {
            own[module] + half: factor
            for module, factors in pairs.items()
            for half, factor in zip((_A, _B), factors, strict=True)
        }
    if len(short) == len(pairs) and (apart := divided(short, transformer, family)) is not None:
        return apart
    # Dividing joined layers keeps the sum of squares of every B; dropping one does not.
    wanted, cause = _energy(up for _, up in pairs.values()), ""
    for form in _forms(pairs):
        try:
            converted = family.pipeline_class.lora_state_dict(form)
        # Whatever names that a converter did not expect make it raise.
        except Exception as error:  # noqa: BLE001
            words = " ".join(str(error).split())
            cause = cause or f"; {type(error).__name__}: {words:.300}"
            continue
        weights = {name.removeprefix("transformer."): t for name, t in converted.items()}
        modules = {name.removesuffix(_A).removesuffix(_B) for name in weights}
        whole = {module + half for module in modules for half in (_A, _B)} == set(weights)
        found = _energy(weights[name] for name in weights if name.endswith(_B))
        # Fresh adapters have no squares to miss.
        whole = whole and len(modules) >= len(pairs)
        if whole and modules <= known and math.isclose(found, wanted):
            return weights | _swapped(transformer, pairs)
    unknown = sorted(module for module, name in own.items() if not name) or sorted(pairs)
    raise ModelFolderError(
        f"{file}: {len(unknown)} of {len(pairs)} adapted modules are not in this transformer, "
        f"first {unknown[0]} ({_scheme(pairs)}), and diffusers' converter for {family.pipeline} "
        "does not place all of them exactly; it belongs to another model, or its naming scheme is "
        f"not known{cause}"
    )


def _swapped(transformer: Any, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The last modulation: diffusers has scale and shift the other way round than the authors, and
    its converter for FLUX.2 leaves that out."""
    from diffusers.models.normalization import AdaLayerNormContinuous

    if not isinstance(getattr(transformer, "norm_out", None), AdaLayerNormContinuous):
        return {}
    ups = (up for module, (_, up) in pairs.items() if _LAST_MODULATION.search(module))
    return {f"norm_out.linear{_B}": torch.cat(up.chunk(2)[::-1]) for up in ups}


def _forms(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The names that converters of diffusers look for."""
    for halves in _CONVERTED:
        for prefix in ("", "diffusion_model."):
            named = {_PREFIXES.sub(prefix, m, count=1) if prefix else m: pairs[m] for m in pairs}
            yield {
                module + half: factor
                for module, factors in named.items()
                for half, factor in zip(halves, factors, strict=True)
            }


def _energy(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors)


def _scheme(pairs: Mapping[str, object]) -> str:
    for part, scheme in (
        ("lora_unet_", "kohya's names"),
        ("diffusion_model.", "ComfyUI's names"),
        (_PEFT, "peft's names"),
        ("processor", "names of attention processors, as XLabs has them"),
        ("transformer.", "diffusers' names"),
    ):
        if any(part in module for module in pairs):
            return scheme
    return "names of no known scheme"


def _check_bound(transformer: Any, weights: Mapping[str, Tensor], file: Path) -> None:
    """peft passes over what it does not place; and a layer must apply exactly B A."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    bound: dict[str, Tensor] = {}
    for name, layer in transformer.named_modules():
        if isinstance(layer, BaseTunerLayer) and layer.scaling[ADAPTER] == 1:
            bound[name + _A] = layer.lora_A[ADAPTER].weight
            bound[name + _B] = layer.lora_B[ADAPTER].weight
    wrong = [
        name
        for name in weights.keys() | bound.keys()
        if name not in weights
        or name not in bound
        or not torch.equal(bound[name].cpu(), weights[name].to(bound[name].dtype))
    ]
    if wrong:
        raise ModelFolderError(
            f"{file}: {len(wrong)} tensors did not arrive in the transformer as they are, first "
            f"{min(wrong)}"
        )
