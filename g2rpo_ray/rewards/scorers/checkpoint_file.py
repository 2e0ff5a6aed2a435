"""Weight files of scorers: read without unpickling, and bound without a tensor left over."""

import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from g2rpo_ray.common.files import cause_of
from g2rpo_ray.common.weight_files import INTEGER_BUFFERS
from g2rpo_ray.rewards.scorer import ScorerError

KEYS_NAMED = 5
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What weights are read from: numbers of 8 bits mean nothing without scales, which are not read."""


def load_state_dict(checkpoint: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Weights of a ``.pt`` (``{'state_dict': ...}`` or bare) or ``.safetensors`` file.

    Args:
        device: ``meta`` reads names, types and shapes alone.

    Raises:
        ScorerError: the file is missing, damaged, or holds anything but tensors (never unpickled).
    """
    from safetensors.torch import load_file

    if not checkpoint.is_file():
        raise ScorerError(f"{checkpoint}: no such checkpoint file")
    try:
        if checkpoint.suffix == ".safetensors":
            # safetensors knows no meta; on the CPU the file is mapped, and no weight is read.
            state = load_file(checkpoint, "cpu" if device == "meta" else device)
            return {name: tensor.to(device) for name, tensor in state.items()}
        content = torch.load(checkpoint, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own words advise to load it with weights_only=False, which would run its code.
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {found[1]}" if found else "it is no checkpoint of torch's"
        raise ScorerError(
            f"{checkpoint}: not a file of plain tensors: {what}. Files that could run code are not "
            "read; save the model's state_dict, or take the published file again"
        ) from error
    # Whatever a damaged zip or pickle, or a file of another kind, makes torch.load raise.
    except Exception as error:
        raise ScorerError(
            f"{checkpoint}: damaged, or no checkpoint: {type(error).__name__}: "
            f"{cause_of(error, checkpoint)}; take the published file again"
        ) from error
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ScorerError(
            f"{checkpoint}: expected tensors by name, bare or under 'state_dict', found "
            f"{type(state).__name__}"
        )
    return state


def renamed(name: str, rules: Iterable[tuple[str, str]]) -> str:
    """A tensor's name after (pattern, replacement), one after the other."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def load_weights(
    model: torch.nn.Module, state: dict[str, Tensor], source: Path, assign: bool = False
) -> None:
    """Fill a model with exactly these weights.

    Args:
        assign: they become the model's, on their device and in their type, instead of being copied.

    Raises:
        ScorerError: keys are missing or left over, shapes differ, or weights are quantised; the
            first few are named.
    """
    wanted = model.state_dict()
    weights = {name: t for name, t in state.items() if name in wanted}
    refuse_quantised(source, {n: t for n, t in weights.items() if wanted[n].is_floating_point()})
    misshapen = [
        f"{name} {list(state[name].shape)} instead of {list(wanted[name].shape)}"
        for name in wanted.keys() & state.keys()
        if state[name].shape != wanted[name].shape
    ]
    refuse_misfits(source, wanted.keys() - state.keys(), state.keys() - wanted.keys(), misshapen)
    model.load_state_dict(state, assign=assign)


def refuse_quantised(source: Path, weights: Mapping[str, Tensor]) -> None:
    """Raises ScorerError where some are not floating point of 16 bits or more."""
    for name, tensor in weights.items():
        if tensor.dtype not in FLOATS and not name.endswith(INTEGER_BUFFERS):
            raise ScorerError(
                f"{source}: {name} holds {tensor.dtype} numbers; weights must be floating point of "
                "16 bits or more: quantised files cannot be used, take the published one"
            )


def refuse_misfits(
    source: Path, missing: Iterable[str], unexpected: Iterable[str], misshapen: Iterable[str] = ()
) -> None:
    """Raise a ScorerError that lists the first few of each, unless there are none."""
    problems = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    listed = []
    for problem, found in problems.items():
        if names := sorted(found):
            more = ", ..." if len(names) > KEYS_NAMED else ""
            listed.append(f"{len(names)} {problem}: {', '.join(names[:KEYS_NAMED])}{more}")
    if listed:
        raise ScorerError(f"{source}: does not fit the architecture: {'; '.join(listed)}")
