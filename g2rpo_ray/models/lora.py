"""What of the transformer is trained: LoRA adapters through peft, all weights, or some."""

from typing import Any

import torch

from g2rpo_ray.config import LoraSection
from g2rpo_ray.models.family import Family, ModelFolderError

ADAPTER = "default"


def add_lora(transformer: Any, lora: LoraSection, family: Family, seed: int) -> None:
    """Inject trainable adapters; everything else is frozen.

    A adapters start random (from ``seed``), B adapters at zero: the model is unchanged at first.

    Raises:
        ModelFolderError: a target matches no module.
    """
    from peft import LoraConfig

    targets = lora.target_modules or family.lora_targets
    matched: set[str] = set()
    linear = [n for n, m in transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    for target in targets:
        hits = {name for name in linear if _matches(name, target)}
        if not hits:
            raise ModelFolderError(
                f"model.lora.target_modules: {target!r} matches no linear layer of "
                f"{type(transformer).__name__}; examples of layers: {', '.join(linear[:4])}"
            )
        matched |= hits
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer.add_adapter(
            LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=sorted(matched)),
            adapter_name=ADAPTER,
        )
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name)


def choose_trained(transformer: torch.nn.Module, modules: list[str] | None) -> None:
    """Train all weights, or those of some parts of the transformer.

    Args:
        modules: components of names that follow each other, such as ``attn.to_q``.

    Raises:
        ModelFolderError: one matches no weight.
    """
    transformer.requires_grad_(modules is None)
    for module in modules or []:
        matched = [p for n, p in transformer.named_parameters() if f".{module}." in f".{n}."]
        if not matched:
            raise ModelFolderError(
                f"model.trained_modules: {module!r} is part of no weight's name in "
                f"{type(transformer).__name__}; parts are "
                f"{', '.join(name for name, _ in transformer.named_children())}"
            )
        for parameter in matched:
            parameter.requires_grad_(True)


def coverage(transformer: torch.nn.Module) -> str:
    """One line that says what is trained: modules, tensors and parameters."""
    named = dict(transformer.named_parameters())
    # Under ZeRO-3 a parameter is empty between uses, and DeepSpeed keeps its size beside it.
    sizes = {name: getattr(p, "ds_numel", p.numel()) for name, p in named.items()}
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    total, count = sum(sizes.values()), sum(sizes[name] for name in trained)
    modules = {n.partition(".lora_")[0] if ".lora_" in n else n.rpartition(".")[0] for n in trained}
    return f"{count:,} of {total:,} parameters in {len(trained)} tensors of {len(modules)} modules"


def _matches(name: str, target: str) -> bool:
    head, star, tail = target.partition("*.")
    if star:
        return name.startswith(head) and name.endswith("." + tail)
    return name == target or name.endswith("." + target)
