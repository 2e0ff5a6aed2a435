"""Weight files of scorers: read without unpickling, and bound without a tensor left over."""

from pathlib import Path

import torch
from torch import Tensor

from g2rpo_ray.rewards.scorer import ScorerError

KEYS_NAMED = 5


def load_state_dict(checkpoint: Path) -> dict[str, Tensor]:
    """Weights of a ``.pt`` (``{'state_dict': ...}`` or bare) or ``.safetensors`` file.

    Raises:
        ScorerError: the file is missing, damaged, or holds anything but tensors (never unpickled).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not checkpoint.is_file():
        raise ScorerError(f"{checkpoint}: no such checkpoint file")
    try:
        if checkpoint.suffix == ".safetensors":
            return load_file(checkpoint)
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    # torch.load raises whatever a damaged zip or pickle makes it raise.
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, SafetensorError) as error:
        raise ScorerError(f"{checkpoint}: damaged checkpoint: {error}") from error
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise ScorerError(f"{checkpoint}: not a file of plain tensors: {error}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ScorerError(
            f"{checkpoint}: expected tensors by name, bare or under 'state_dict', found "
            f"{type(state).__name__}"
        )
    return state


def load_weights(model: torch.nn.Module, state: dict[str, Tensor], source: Path) -> None:
    """Fill a model with exactly these weights.

    Raises:
        ScorerError: keys are missing or left over, or shapes differ; the first few are named.
    """
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in state.items()}
    misshapen = [
        f"{name} {list(given[name])} instead of {list(wanted[name])}"
        for name in wanted
        if name in given and given[name] != wanted[name]
    ]
    problems = {
        "missing": [name for name in wanted if name not in given],
        "unexpected": [name for name in given if name not in wanted],
        "wrong shape": misshapen,
    }
    if any(problems.values()):
        listed = "; ".join(
            f"{len(names)} {problem}: {', '.join(names[:KEYS_NAMED])}"
            + (", ..." if len(names) > KEYS_NAMED else "")
            for problem, names in problems.items()
            if names
        )
        raise ScorerError(f"{source}: does not fit the architecture: {listed}")
    model.load_state_dict(state)
