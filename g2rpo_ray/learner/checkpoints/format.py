"""Checkpoints: written whole or not at all, checked after writing, never unpickled.

Layout of one checkpoint, ``<run_dir>/checkpoints/iteration_000012/``:

- ``state.json``: format, iteration, weight version, optimizer updates, what is trained and from
  which base, and the SHA-256 of every other file;
- ``trainable-00000.safetensors``, one for each learner rank: its part of the fp32 weights by name
  (LoRA adapters, or the whole transformer), and of their moving average where there is one;
- ``optimizer-00000.safetensors``: its part of AdamW's ``exp_avg.<name>``, ``exp_avg_sq.<name>``.

A part is a range of a flattened tensor; where it begins, and the tensor's shape, is in the file's
metadata. So no rank ever holds more than its own part, and any number of ranks can resume. Prompt
order and noise are functions of seed and iteration, so there is no other state to keep.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from g2rpo_ray.common.files import (
    DiskError,
    cause_of,
    check_room,
    flush,
    replace_text,
    sha256_of_file,
    writing,
)
from g2rpo_ray.learner.checkpoints.fence import UNFENCED, Fence
from g2rpo_ray.learner.checkpoints.folders import hide
from g2rpo_ray.learner.checkpoints.parts import (
    CheckpointError,
    StatePart,
    StateReader,
    equals_file,
    write_parts,
)

FORMAT = 4
ANOTHER = "name another checkpoint (train: --resume PATH, other commands: --checkpoint PATH)"
"""What to do about a damaged one: every command that reads weights may meet it."""
WEIGHTS_FILE, OPTIMIZER_FILE = "trainable-{:05d}.safetensors", "optimizer-{:05d}.safetensors"
RANK_FILE = "rank-{:05d}.json"
"""What a rank has written, for state.json; or why it could not."""
WEIGHT_PREFIX, AVERAGE_PREFIX = "weight.", "ema."
POLL_S = 0.1
HASHED_AT_ONCE = 2 * 2**30
"""Bytes of files that are hashed before anything starts, in seconds; more are by who reads them."""


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
    base: str = ""
    """Fingerprint of the base model's weights that training began with; empty: not known."""
    reward_scales: dict[str, float] = field(default_factory=dict)
    """What guards have multiplied the weights of trained rewards by; 1 of those not named."""
    judged: int = 0
    """Iteration of the last evaluation that the scales take into account."""


def prepare_checkpoint(folder: Path, size_bytes: int = 0, fence: Fence = UNFENCED) -> None:
    """Make the place where the ranks write, without the left-overs of earlier tries.

    Args:
        size_bytes: of what all ranks will write.
        fence: the ranks', of all three functions.

    Raises:
        FencedError: newer ranks write there.
        DiskError: the disk is full or read-only, or has less room.
        CheckpointError: the system allows no writing there.
    """
    with _removed_on_failure(folder, fence), fence.held():
        for left_over in folder.parent.glob(".iteration_*"):
            # Ranks that were given up may write or delete there still: the next one takes the rest.
            shutil.rmtree(left_over, ignore_errors=True)
        _temporary(folder, fence).mkdir(parents=True)
        check_room(folder, size_bytes, "a checkpoint")


def write_rank(
    folder: Path, rank: int, parts: Sequence[StatePart], fence: Fence = UNFENCED
) -> None:
    """Write, read back and compare one rank's part, after ``prepare_checkpoint``.

    A full disk, or what was read back and differs, is noted for ``commit_checkpoint`` to raise.

    Raises:
        DiskError: not even that could be noted.
        CheckpointError: the place is not there.
    """
    temporary = _temporary(folder, fence)
    if not temporary.is_dir():
        raise CheckpointError(
            f"{temporary}: not there on rank {rank}; run_dir must be on a file system that all "
            "learner ranks share"
        )
    averages = (WEIGHT_PREFIX, AVERAGE_PREFIX)
    contents = {
        WEIGHTS_FILE.format(rank): [p for p in parts if p.key.startswith(averages)],
        OPTIMIZER_FILE.format(rank): [p for p in parts if not p.key.startswith(averages)],
    }
    note: dict[str, object] = {}
    with _removed_on_failure(folder, fence):
        try:
            note["files"] = {n: _write_file(temporary / n, c) for n, c in contents.items()}
        except (DiskError, CheckpointError) as error:
            note["error"] = f"learner rank {rank}: {error}"
            # On a full disk this makes room for the note.
            for name in contents:
                (temporary / name).unlink(missing_ok=True)
        replace_text(temporary / RANK_FILE.format(rank), json.dumps(note))


def _write_file(path: Path, parts: Sequence[StatePart]) -> str:
    """SHA-256 of what was written, flushed, and found equal when it was read back."""
    with writing(path, CheckpointError):
        write_parts(path, parts)
        flush(path)
        if not equals_file(path, parts):
            raise DiskError(f"what was read back of {path} differs")
        return sha256_of_file(path)


def commit_checkpoint(
    folder: Path, info: CheckpointInfo, ranks: int, timeout_s: float, fence: Fence = UNFENCED
) -> None:
    """Wait until all ranks have written their parts, and give the checkpoint its name.

    Raises:
        FencedError: newer ranks have begun meanwhile.
        DiskError: the disk is full or read-only, for a rank or here, or gave back something else.
        CheckpointError: a rank did not write in time.
    """
    temporary = _temporary(folder, fence)
    notes = [temporary / RANK_FILE.format(rank) for rank in range(ranks)]
    with _removed_on_failure(folder, fence):
        deadline_s = time.monotonic() + timeout_s
        while missing := [rank for rank, note in enumerate(notes) if not note.exists()]:
            if not temporary.is_dir():
                # Newer ranks take away what older ones have not finished: that is told then.
                with fence.held():
                    raise CheckpointError(
                        f"{folder}: learner ranks {missing} have given up, see theirs"
                    )
            if time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"{folder}: learner ranks {missing} wrote no part within {timeout_s:g} s "
                    "(learner.timeout_s); run_dir must be on a file system that all ranks share"
                )
            time.sleep(POLL_S)
        files: dict[str, str] = {}
        for note in notes:
            written = json.loads(note.read_text())
            if "error" in written:
                raise DiskError(f"{folder}: checkpoint not written: {written['error']}")
            files |= written["files"]
            note.unlink()
        content = {"format": FORMAT, **asdict(info), "files": files}
        replace_text(temporary / "state.json", json.dumps(content, indent=1))
        flush(temporary)
        with fence.held():
            # One of this iteration may be there when a run was resumed from an older one.
            replaced = hide(folder) if folder.exists() else None
            temporary.rename(folder)
            flush(folder.parent)
            if replaced is not None:
                shutil.rmtree(replaced)


def open_checkpoint(folder: Path) -> tuple[CheckpointInfo, StateReader]:
    """Check a checkpoint, and open its tensors for reading.

    Raises:
        CheckpointError: a file is missing, cut short, changed, or of another format.
    """
    info, files = _read_description(folder)
    return info, _open_files(folder, files)


def read_weights(folder: Path, average: bool = False) -> dict[str, Tensor]:
    """fp32 trainable weights of a checkpoint by name, checked; the optimizer's are not read.

    Args:
        average: the moving average of ``learner.ema_decay`` instead.

    Raises:
        CheckpointError: as ``open_checkpoint``, or the run kept no average.
    """
    _, files = _read_description(folder)
    reader = _open_files(folder, _weights_files(files))
    prefix = AVERAGE_PREFIX if average else WEIGHT_PREFIX
    weights = {key.removeprefix(prefix): reader[key] for key in reader if key.startswith(prefix)}
    if not weights:
        raise CheckpointError(f"{folder}: holds no moving average (learner.ema_decay was not set)")
    return weights


def check_whole(folder: Path, weights_alone: bool = False) -> None:
    """Before anything starts: that files are there, not cut short, and, where they are small, as
    they were written; ``open_checkpoint`` and ``read_weights`` look at the rest.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    _, files = _read_description(folder)
    files = _weights_files(files) if weights_alone else files
    sizes = [path.stat().st_size for name in files if (path := folder / name).is_file()]
    _open_files(folder, files, hashed=sum(sizes) <= HASHED_AT_ONCE)


def weights_checksum(folder: Path) -> str:
    """SHA-256 of the SHA-256s of a checkpoint's weights files, which its description has."""
    files = _weights_files(_read_description(folder)[1])
    return hashlib.sha256("".join(files[name] for name in sorted(files)).encode()).hexdigest()


def pin_weights(folder: Path, target: Path) -> None:
    """Keep a checkpoint's weights at ``target``, whatever becomes of ``folder``; whole or not.

    By hard links, which cost no room, or copies where the file system has none.

    Raises:
        CheckpointError: the checkpoint is not there, or goes meanwhile.
        DiskError: the disk is full or read-only.
    """
    names = ["state.json", *_weights_files(_read_description(folder)[1])]
    temporary = target.with_name(f".{target.name}.pinning")
    with writing(target, CheckpointError):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name in names:
            try:
                (temporary / name).hardlink_to(folder / name)
            except OSError:
                shutil.copyfile(folder / name, temporary / name)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)


def read_info(folder: Path) -> CheckpointInfo:
    """The description of a checkpoint, without its tensors."""
    return _read_description(folder)[0]


def is_checkpoint_of(folder: Path, info: CheckpointInfo) -> bool:
    """Whether a whole checkpoint of exactly this state is there."""
    return folder.is_dir() and read_info(folder) == info


def _weights_files(files: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256s of the files with weights, by name."""
    first = WEIGHTS_FILE.partition("{")[0]
    return {name: sha256 for name, sha256 in files.items() if name.startswith(first)}


def _open_files(folder: Path, files: Mapping[str, str], hashed: bool = True) -> StateReader:
    for path, expected in ((folder / name, sha256) for name, sha256 in files.items()):
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; the checkpoint is incomplete; {ANOTHER}")
        if hashed and sha256_of_file(path) != expected:
            raise CheckpointError(f"{path}: damaged (SHA-256 differs from state.json); {ANOTHER}")
    try:
        return StateReader([folder / name for name in files])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: damaged: {error}; {ANOTHER}") from error


def _read_description(folder: Path) -> tuple[CheckpointInfo, dict[str, str]]:
    """What state.json says: the checkpoint's info, and the SHA-256 of each file."""
    path = folder / "state.json"
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder}: no checkpoint there (no state.json); a run has them in checkpoints/"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not readable: {cause_of(error, path)}; {ANOTHER}"
        ) from error
    found = content.pop("format", None) if isinstance(content, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{path}: a checkpoint of format {found}, this version reads {FORMAT}; use the version "
            "of g2rpo-ray that wrote it (versions.json of the run names it)"
        )
    if isinstance(content.get("iteration"), int):
        # Those that were written before guards lowered weights.
        content = {"reward_scales": {}, "judged": content["iteration"]} | content
    expected = {field.name for field in fields(CheckpointInfo)} | {"files"}
    if content.keys() != expected:
        raise CheckpointError(
            f"{path}: entries {', '.join(sorted(content.keys() ^ expected))} are missing or unknown"
            f"; {ANOTHER}"
        )
    files = content.pop("files")
    ranks = len(files) // 2 if isinstance(files, dict) else 0
    names = {kind.format(r) for kind in (WEIGHTS_FILE, OPTIMIZER_FILE) for r in range(ranks)}
    if ranks == 0 or files.keys() != names:
        raise CheckpointError(
            f"{path}: 'files' must list {WEIGHTS_FILE.format(0)}, {OPTIMIZER_FILE.format(0)} and "
            f"so on with their SHA-256; {ANOTHER}"
        )
    return CheckpointInfo(**content), files


def _temporary(folder: Path, fence: Fence) -> Path:
    """Of each generation its own: ranks that are cut off must not write into another's files."""
    return folder.with_name(f".{folder.name}.{fence.generation}.writing")


@contextmanager
def _removed_on_failure(folder: Path, fence: Fence) -> Iterator[None]:
    """A half-written checkpoint goes; what was there before stays."""
    try:
        with writing(folder, CheckpointError):
            yield
    except BaseException:
        shutil.rmtree(_temporary(folder, fence), ignore_errors=True)
        raise
