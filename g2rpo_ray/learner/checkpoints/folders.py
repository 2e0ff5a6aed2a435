"""Where a run's states lie: checkpoints and snapshots by iteration, and which of them are kept."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from g2rpo_ray.common.files import cause_of, writing
from g2rpo_ray.learner.checkpoints.parts import CheckpointError

SNAPSHOTS = "snapshots"
"""Folder, laid out like a run's, of the states that are kept only until the next checkpoint."""
SNAPSHOTS_KEPT = 2


def checkpoint_folder(run_dir: Path, iteration: int) -> Path:
    return run_dir / "checkpoints" / f"iteration_{iteration:06d}"


def iteration_of(folder: Path) -> int:
    """Iteration that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("iteration_"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, oldest first.

    Raises:
        CheckpointError: the folder cannot be read; ``Path.glob`` would find none, and a resumed run
            would start anew.
    """
    folder = run_dir / "checkpoints"
    try:
        found = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be read: {cause_of(error, folder)}; a run's states lie there: let "
            "it be read"
        ) from error
    return [path for path in found if re.fullmatch("iteration_[0-9]{6}", path.name)]


def delete_old_checkpoints(
    run_dir: Path, keep_last: int, newest: Path, keep_also: Sequence[int] = ()
) -> None:
    """Keep the last ones up to ``newest``, which was just written, and those of some iterations.

    Later ones are of a history that a resume from an older checkpoint gave up; kept, they would be
    what the next ``--resume auto`` takes. Snapshots are of no use beside a newer checkpoint.

    Raises:
        DiskError, CheckpointError: one cannot be deleted.
    """
    checkpoints = list_checkpoints(run_dir)
    until_now = [folder for folder in checkpoints if folder <= newest]
    kept = {*until_now[-keep_last:], *(checkpoint_folder(run_dir, n) for n in keep_also)}
    _delete([folder for folder in checkpoints if folder > newest or folder not in kept])
    _delete(list_checkpoints(run_dir / SNAPSHOTS))
    shutil.rmtree(run_dir / SNAPSHOTS, ignore_errors=True)


def list_states(run_dir: Path) -> list[Path]:
    """Checkpoints and snapshots of a run, oldest first; of one iteration the snapshot last."""
    states = list_checkpoints(run_dir) + list_checkpoints(run_dir / SNAPSHOTS)
    return sorted(states, key=iteration_of)


def where_to_resume(run_dir: Path) -> str:
    """In words, for who reads why a run ended: what ``--resume auto`` would take now."""
    states = list_states(run_dir)
    if not states:
        return f"--resume auto starts anew: there is no checkpoint and no snapshot in {run_dir}"
    return f"--resume auto goes on after iteration {iteration_of(states[-1])}, from {states[-1]}"


def delete_states_from(run_dir: Path, iteration: int) -> None:
    """Delete a run's checkpoints and snapshots of ``iteration`` and later.

    Raises:
        DiskError, CheckpointError: one cannot be deleted.
    """
    _delete([state for state in list_states(run_dir) if iteration_of(state) >= iteration])


def _delete(folders: Sequence[Path]) -> None:
    if not folders:
        return
    with writing(folders[0].parent, CheckpointError):
        # All first: a process that ends in between leaves none of them under its name.
        for hidden in [hide(folder) for folder in folders]:
            shutil.rmtree(hidden)


def hide(folder: Path) -> Path:
    """Take a state's name from its folder, to be deleted: half of one must not bear it."""
    return folder.rename(folder.with_name(f".{folder.name}.deleted"))
