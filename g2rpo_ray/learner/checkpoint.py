"""Checkpoints: written whole or not at all, checked after writing, never unpickled.

Layout of one checkpoint, ``<run_dir>/checkpoints/iteration_000012/``:

- ``state.json``: format, iteration, weight version, optimizer updates, what is trained, and the
  SHA-256 of every other file;
- ``trainable.safetensors``: fp32 weights by name (LoRA adapters, or the whole transformer);
- ``optimizer.safetensors``: AdamW's ``exp_avg.<name>`` and ``exp_avg_sq.<name>``.

Prompt order and noise are functions of seed and iteration, so there is no other state to keep.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo_ray.errors import InputError

FORMAT = 1
WEIGHTS_FILE = "trainable.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
WEIGHT_PREFIX = "weight."


class CheckpointError(InputError):
    """A checkpoint cannot be written or used; the message names the file and the cause."""


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint belongs to."""

    iteration: int
    """Iterations done; a resumed run starts with this one."""
    weight_version: int
    updates: int
    """Optimizer steps done."""
    evaluations: int
    """Network evaluations of the run so far."""
    train_s: float
    """Seconds of training so far."""
    trained: str
    """Kind of trained weights, e.g. ``full`` or ``lora rank 16 alpha 32``."""
    seed: int
    trained_steps: list[int] = field(default_factory=list)
    """SDE steps of the iteration to come: where a sliding window stands."""


def write_checkpoint(folder: Path, info: CheckpointInfo, state: Mapping[str, Tensor]) -> None:
    """Write ``LearnerEngine.state()`` and ``info`` to ``folder``, replacing nothing on failure.

    Raises:
        CheckpointError: the disk is full or read-only, or what was read back differs.
    """
    temporary = folder.with_name(f".{folder.name}.writing")
    weights = {
        name.removeprefix(WEIGHT_PREFIX): tensor
        for name, tensor in state.items()
        if name.startswith(WEIGHT_PREFIX)
    }
    moments = {n: t for n, t in state.items() if not n.startswith(WEIGHT_PREFIX)}
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(weights, temporary / WEIGHTS_FILE)
        save_file(moments, temporary / OPTIMIZER_FILE)
        files = {name: _sha256(temporary / name) for name in (WEIGHTS_FILE, OPTIMIZER_FILE)}
        content = {"format": FORMAT, **asdict(info), "files": files}
        (temporary / "state.json").write_text(json.dumps(content, indent=1))
        _, read_back = read_checkpoint(temporary)
        if any(not read_back[name].equal(tensor) for name, tensor in state.items()):
            raise CheckpointError(f"{folder}: what was read back differs from what was written")
        _flush(temporary)
        # A checkpoint of this iteration is there when a run was resumed from it and stopped.
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: checkpoint not written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_checkpoint(folder: Path) -> tuple[CheckpointInfo, dict[str, Tensor]]:
    """Read and check a checkpoint.

    Raises:
        CheckpointError: a file is missing, cut short, changed, or of another format.
    """
    info, files = _read_description(folder)
    for name, expected in files.items():
        _check_file(folder / name, expected)
    state = {WEIGHT_PREFIX + n: t for n, t in load_file(folder / WEIGHTS_FILE).items()}
    return info, state | load_file(folder / OPTIMIZER_FILE)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """fp32 trainable weights of a checkpoint by name, checked; the optimizer's are not read."""
    _, files = _read_description(folder)
    _check_file(folder / WEIGHTS_FILE, files[WEIGHTS_FILE])
    return load_file(folder / WEIGHTS_FILE)


def weights_checksum(folder: Path) -> str:
    """SHA-256 of a checkpoint's weights file, as its description has it."""
    return _read_description(folder)[1][WEIGHTS_FILE]


def read_info(folder: Path) -> CheckpointInfo:
    """The description of a checkpoint, without its tensors."""
    return _read_description(folder)[0]


def checkpoint_folder(run_dir: Path, iteration: int) -> Path:
    return run_dir / "checkpoints" / f"iteration_{iteration:06d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((run_dir / "checkpoints").glob("iteration_*"))


def delete_old_checkpoints(run_dir: Path, keep_last: int, newest: Path) -> None:
    """Keep the last ones up to ``newest``, which was just written.

    Later ones are of a history that a resume from an older checkpoint gave up; kept, they would be
    what the next ``--resume auto`` takes.
    """
    checkpoints = list_checkpoints(run_dir)
    kept = [folder for folder in checkpoints if folder <= newest][-keep_last:]
    for folder in checkpoints:
        if folder not in kept:
            shutil.rmtree(folder)


def _check_file(path: Path, expected_sha256: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete")
    if _sha256(path) != expected_sha256:
        raise CheckpointError(
            f"{path}: damaged (SHA-256 differs from state.json); use an older checkpoint "
            "with --resume PATH"
        )


def _read_description(folder: Path) -> tuple[CheckpointInfo, dict[str, str]]:
    """What state.json says: the checkpoint's info, and the SHA-256 of each file."""
    path = folder / "state.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no checkpoint there (no state.json)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path}: not a checkpoint of format {FORMAT}")
    expected = {field.name for field in fields(CheckpointInfo)} | {"files"}
    if content.keys() != expected:
        raise CheckpointError(
            f"{path}: entries {', '.join(sorted(content.keys() ^ expected))} are missing or unknown"
        )
    files = content.pop("files")
    if not isinstance(files, dict) or files.keys() != {WEIGHTS_FILE, OPTIMIZER_FILE}:
        raise CheckpointError(
            f"{path}: 'files' must list {WEIGHTS_FILE} and {OPTIMIZER_FILE} with their SHA-256"
        )
    return CheckpointInfo(**content), files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
