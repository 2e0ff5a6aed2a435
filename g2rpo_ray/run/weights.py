"""Which weights a name means, whether they fit the model, and a policy that has them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config, ModelSection
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder, list_checkpoints
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo, read_info, read_weights
from g2rpo_ray.learner.checkpoints.parts import CheckpointError
from g2rpo_ray.models.adapters import adapter_at, load_adapter
from g2rpo_ray.models.fingerprint import OF_TENSORS, base_file_fingerprint, base_fingerprint
from g2rpo_ray.models.loading import DTYPES, load_part
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.saving import load_transformer_weights
from g2rpo_ray.models.weights import load_weights
from g2rpo_ray.run.paths import RunFolderError, run_folder
from g2rpo_ray.run.scores import best_evaluated

T = TypeVar("T")
NAMES = "last, best, or the folder of a checkpoint or of a run"
"""What ``--checkpoint`` takes of a run."""


class SampleError(InputError):
    """Pictures cannot be drawn as asked; the message says why."""


def trained_kind(model: ModelSection) -> str:
    """What is trained, as a checkpoint names it."""
    if model.trained_modules is not None:
        return f"full, of {', '.join(model.trained_modules)}"
    if model.lora is None:
        return "full"
    return f"lora rank {model.lora.rank} alpha {model.lora.alpha:g}"


def read_fitting_info(checkpoint: Path, model: ModelSection) -> CheckpointInfo:
    """The description of a checkpoint, if its weights are of this model.

    Raises:
        CheckpointError: there is none, or it is damaged.
        RunFolderError: its weights are of another kind or base model; both are named.
    """
    info, kind, base = read_info(checkpoint), trained_kind(model), base_fingerprint(model)
    if info.trained != kind:
        raise RunFolderError(
            f"{checkpoint} holds '{info.trained}' weights, the configuration trains '{kind}' "
            "(model.lora, model.trained_modules); they cannot be mixed"
        )
    if info.base in ("", base):
        return info
    is_older = not info.base.startswith(OF_TENSORS)
    if is_older and info.base == base_file_fingerprint(model):
        return replace(info, base=base)
    older = (
        " It is an older checkpoint's fingerprint of files: with a copy of the very files that it "
        "was trained from it resumes, and its next checkpoint takes re-sharded ones, too."
    )
    raise RunFolderError(
        f"{checkpoint} was trained from the base model {info.base}, and model.path "
        f"{model.path!r} has {base} (fingerprints of the transformer's weights); on another base "
        "its weights mean something else: set model.path to the model it was trained from."
        f"{older if is_older else ''}"
    )


def checkpoint_named(config: Config, name: str) -> Path:
    """Folder of a run's ``last`` or ``best`` checkpoint, of the one at the path ``name``, or of
    the last of the run there.

    Raises:
        RunFolderError: the run has no checkpoint, or none that is better than the base model.
    """
    folder = run_folder(config)
    if not name:
        raise RunFolderError(f"--checkpoint is empty: name {NAMES}")
    if name not in ("last", "best"):
        folder = Path(name).expanduser().absolute()
        if not (folder / "checkpoints").is_dir():
            return folder
    if name == "best":
        best = best_evaluated(config)
        if best is None:
            raise RunFolderError(
                f"{config.run_dir}: no checkpoint there was evaluated by checkpoint.best; it names "
                "the reward that a run judges them by"
            )
        if best == 0:
            raise RunFolderError(
                f"{config.run_dir}: no checkpoint there has a higher held-out mean of "
                f"{config.checkpoint.best} than the base model's (sample, evaluate: "
                "--checkpoint base)"
            )
        return checkpoint_folder(folder, best)
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise RunFolderError(
            f"{folder}: no checkpoint there yet (sample, evaluate: --checkpoint base)"
        )
    return checkpoints[-1]


def while_it_is_there(config: Config, name: str, use: Callable[[Path], T]) -> tuple[Path, T]:
    """``use`` on the checkpoint that ``name`` means, and which one that was.

    A running run may delete it meanwhile: ``last`` and ``best`` then mean another one.

    Raises:
        CheckpointError, RunFolderError: as ``checkpoint_named`` and ``use``.
    """
    while True:
        path = checkpoint_named(config, name)
        try:
            return path, use(path)
        except (CheckpointError, FileNotFoundError) as error:
            if path.exists():
                raise
            if checkpoint_named(config, name) == path:
                raise CheckpointError(
                    f"{path}: not there (any more); a run has its checkpoints in checkpoints/. "
                    f"--checkpoint takes {NAMES}"
                ) from error


@dataclass(frozen=True)
class Source:
    """A policy with the weights that were asked for, on the CPU."""

    policy: Policy
    back_to_base: Callable[[], None]
    """Give it the weights of ``model.path`` again, wherever it is by then."""


def load_source(config: Config, checkpoint: str, average: bool = False) -> Source:
    """Args: as of ``sample``.

    Raises:
        ModelFolderError, CheckpointError, RunFolderError, WeightMismatchError: the weights cannot
            be used.
    """
    path = None if checkpoint == "base" else checkpoint_named(config, checkpoint)
    by_name = path is not None and path != Path(checkpoint).expanduser().absolute()
    if path is not None and (by_name or (path / "state.json").exists()):
        # Before the model, whose loading takes minutes: a running run deletes old checkpoints.
        path, weights = while_it_is_there(
            config, checkpoint, lambda found: _fitting_weights(config, found, average)
        )
        print(f"weights: {path}", file=sys.stderr, flush=True)
        policy = load_policy(config)
        load_weights(policy, weights)
        lora = config.model.lora is not None
        return Source(
            policy, policy.transformer.disable_adapters if lora else _reload(policy, config)
        )
    if average:
        raise SampleError(f"{checkpoint} is no checkpoint of a run; only those hold an average")
    is_whole = path is not None and adapter_at(path) is None
    changes = {"lora": None} | ({"frozen_dtype": None} if is_whole else {})
    plain = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    policy = load_policy(plain)
    if path is None:
        return Source(policy, lambda: None)
    if not is_whole:
        load_adapter(policy.transformer, path, policy.family)
        return Source(policy, policy.transformer.disable_adapters)
    load_transformer_weights(policy.transformer, path, config.model.variant)
    return Source(policy, _reload(policy, plain))


def _fitting_weights(config: Config, path: Path, average: bool) -> dict[str, Tensor]:
    read_fitting_info(path, config.model)
    return weights_in(config, path, average)


def _reload(policy: Policy, config: Config) -> Callable[[], None]:
    def back_to_base() -> None:
        base = load_part(config.model, "transformer", DTYPES[config.model.dtype])
        policy.transformer.load_state_dict(base.state_dict())

    return back_to_base


def weights_in(config: Config, checkpoint: Path, average: bool = False) -> dict[str, Tensor]:
    """Trainable weights of a checkpoint (or their moving average) in the model's dtype."""
    dtype, weights = DTYPES[config.model.dtype], wide_weights_in(config, checkpoint, average)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def wide_weights_in(config: Config, checkpoint: Path, average: bool) -> dict[str, Tensor]:
    """As ``weights_in``, in float32; the average where that is what drew and was evaluated."""
    return read_weights(checkpoint, average or config.draws_average)
