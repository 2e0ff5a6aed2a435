"""The run folder: opening it, its lock, and where a run goes on in it.

``<run_dir>/``: ``config.yaml`` (resolved; those of each life in ``settings/``), ``versions.json``,
``metrics.jsonl``, ``log.jsonl``, ``tensorboard/``, ``checkpoints/``, ``pictures/heldout/``,
``embeddings/`` (of held-out prompts), ``summary.json``, ``report.html``.
"""

import fcntl
import json
import logging
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from g2rpo_ray.common.files import replace_text, writing
from g2rpo_ray.config import Config, load_config, save_config
from g2rpo_ray.learner.checkpoints.fence import Fence
from g2rpo_ray.learner.checkpoints.folders import delete_states_from, iteration_of, list_states
from g2rpo_ray.learner.checkpoints.format import CheckpointError, CheckpointInfo, check_whole
from g2rpo_ray.models.fingerprint import base_fingerprint
from g2rpo_ray.run.paths import (
    RESOLVED,
    SETTINGS,
    VERSIONS,
    RunFolderError,
    check_outside_states,
    run_folder,
)
from g2rpo_ray.run.scores import is_stalled, stopping_guard
from g2rpo_ray.run.versions import versions
from g2rpo_ray.run.weights import read_fitting_info, trained_kind

logger = logging.getLogger(__name__)
_MOVES_PROMPTS = dict.fromkeys(
    ("prompts.train", "sampling.prompts_per_iteration"),
    " (an iteration has other prompts now: some already seen come again, others never come)",
)
"""What to say of settings that the place in the prompt order hangs on."""
LIVES = "settings"
"""Folder of the settings of each life of the run, by the iteration that it went on after."""
_LOCKS: dict[Path, TextIO] = {}
"""Run folders that are this process's, with the open files that say so."""
LOCK_WAIT_S, LOCK_POLL_S = 120.0, 2.0
"""Shared storage frees the lock of a host that died after a minute or two: a requeued run waits."""


@dataclass(frozen=True)
class Run:
    """A run folder, and where in it training starts."""

    folder: Path
    checkpoint: Path | None
    """Checkpoint to continue from; None starts at the base model."""
    info: CheckpointInfo
    """State at the start."""
    first_record: int | None
    """First iteration that this life of the run records; None in a new folder."""

    def where_it_starts(self) -> str:
        """In words, for who asked for ``--resume auto``."""
        if self.checkpoint is not None:
            return f"goes on after iteration {self.info.iteration}, from {self.checkpoint}"
        recorded = "" if self.first_record is None else ", and makes anew what it has recorded"
        return f"found no checkpoint and no snapshot in {self.folder}: starts anew{recorded}"


def open_run(config: Config, resume: str) -> Run:
    """Make the run folder, or find the checkpoint to continue from; no other process may, then.

    Args:
        resume: ``none`` starts a new run and refuses a folder that has one; ``auto`` continues
            from the last checkpoint where there is one; else the folder of a checkpoint.

    Raises:
        RunFolderError: the folder has a run already, lies among another's checkpoints, another
            process trains in it, or the checkpoint is of another kind.
        CheckpointError: the checkpoint is damaged, as far as ``check_whole`` sees.
    """
    folder = run_folder(config)
    check_outside_states(folder, RunFolderError, "run_dir")
    if folder.is_dir():
        # Before anything is read: who had to wait goes on from what the other has saved last.
        with writing(folder, RunFolderError, "run_dir"):
            _lock(folder)
    has_run = _has_run(folder)
    if has_run and resume == "none":
        raise RunFolderError(
            f"run_dir {folder} already has a run: --resume auto continues it from its last "
            "checkpoint; or name another run_dir"
        )
    if has_run:
        # What is chosen now must still be there when ranks read it.
        Fence(folder).following()
    checkpoint = _checkpoint_of(folder, resume)
    info = _info_at_start(config, folder, checkpoint)
    if checkpoint is not None:
        check_whole(checkpoint)
    first_record = None
    if has_run:
        first_record = 0 if checkpoint is None else info.iteration + 1
    with writing(folder, RunFolderError, "run_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        if not has_run:
            _write_settings(config, folder, info.iteration)
    return Run(folder, checkpoint, info, first_record)


def begin_life(run: Run, config: Config) -> None:
    """All roles have started: the run goes on with these settings, from where it was resumed.

    Not before: a resume that failed must not leave its settings to the next one. The states and
    pictures of the iterations that this life makes again are deleted: kept, the next ``--resume
    auto`` would go on from the history that this resume gave up. The summary goes, too, until this
    life has ended: the report would show the earlier life's as its.

    Raises:
        CheckpointError: a state cannot be deleted.
        RunFolderError: the settings cannot be written.
    """
    if run.first_record is None:
        return
    with writing(run.folder, RunFolderError, "run_dir"):
        for earlier in (run.folder / LIVES).glob("after_iteration_*.yaml"):
            if int(earlier.stem.rpartition("_")[2]) > run.info.iteration:
                earlier.unlink()
        _write_settings(config, run.folder, run.info.iteration)
    delete_states_from(run.folder, run.first_record)
    (run.folder / "summary.json").unlink(missing_ok=True)
    for pictures in run.folder.glob("pictures/heldout/iteration_*.json"):
        if iteration_of(pictures.with_suffix("")) >= run.first_record:
            pictures.unlink()
            shutil.rmtree(pictures.with_suffix(""), ignore_errors=True)


def write_resolved(config: Config) -> Path:
    """Write the resolved configuration into ``run_dir`` without starting a run there."""
    folder = run_folder(config)
    check_outside_states(folder, RunFolderError, "run_dir")
    with writing(folder, RunFolderError, "run_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / RESOLVED)
    return folder / RESOLVED


def changed_settings(folder: Path, config: Config) -> list[str]:
    """Settings that differ from those of the run's last life, as ``key: old -> new``."""
    saved = folder / SETTINGS
    if not saved.exists():
        return []
    old, new = (_flat(c.model_dump(mode="json")) for c in (load_config(saved), config))
    keys = sorted(old.keys() | new.keys())
    return [
        f"{k}: {old.get(k)} -> {new.get(k)}{_MOVES_PROMPTS.get(k, '')}"
        for k in keys
        if old.get(k) != new.get(k)
    ]


def _write_settings(config: Config, folder: Path, iteration: int) -> None:
    """Of the life that goes on after ``iteration``; those of the lives before stay beside them."""
    replace_text(folder / VERSIONS, json.dumps(versions(), indent=1))
    (folder / LIVES).mkdir(exist_ok=True)
    save_config(config, folder / LIVES / f"after_iteration_{iteration:06d}.yaml")
    save_config(config, folder / SETTINGS)


def _checkpoint_of(folder: Path, resume: str) -> Path | None:
    if resume == "none":
        return None
    if resume == "auto":
        return next(reversed(list_states(folder)), None)
    path = Path(resume).expanduser().absolute()
    if not path.is_dir():
        raise CheckpointError(
            f"--resume {resume}: no such folder; it takes auto, none, or a folder"
        )
    return path


def _info_at_start(config: Config, folder: Path, checkpoint: Path | None) -> CheckpointInfo:
    if checkpoint is None:
        kind, base = trained_kind(config.model), base_fingerprint(config.model)
        return CheckpointInfo(0, 0, 0, 0, 0.0, kind, config.seed, base=base)
    info = read_fitting_info(checkpoint, config.model)
    if info.seed != config.seed:
        raise RunFolderError(
            f"{checkpoint} belongs to seed {info.seed}, the configuration has seed "
            f"{config.seed}; the prompts already seen would differ"
        )
    if info.iteration > config.iterations:
        raise RunFolderError(
            f"{checkpoint} is at iteration {info.iteration}, beyond "
            f"iterations={config.iterations}; raise it to go on"
        )
    if info.iteration != _finished_iterations(folder):
        return info
    if info.iteration == config.iterations:
        raise RunFolderError(
            f"{checkpoint} is at iteration {info.iteration} of {config.iterations}: the run "
            "is complete; raise iterations to go on"
        )
    if guard := stopping_guard(config):
        raise RunFolderError(
            f"{checkpoint}: the run ended early at iteration {info.iteration} of "
            f"{config.iterations} (evaluation.guards.{guard}); raise its max_drop, or set its then "
            "to warn, to go on"
        )
    if is_stalled(config):
        raise RunFolderError(
            f"{checkpoint}: the run ended early at iteration {info.iteration} of "
            f"{config.iterations} (evaluation.patience is {config.evaluation.patience}); raise "
            "patience, or set it to 0, to go on"
        )
    return info


def _lock(folder: Path) -> None:
    """Keep other drivers out of the folder until this process ends, in whatever way."""
    if folder in _LOCKS:
        return
    path = folder / ".lock"
    file = path.open("a+", encoding="utf-8")
    end_s = time.monotonic() + LOCK_WAIT_S
    told = False
    while holder := _holder_of(file):
        if holder.endswith(f" on {socket.gethostname()}") or time.monotonic() >= end_s:
            raise RunFolderError(
                f"run_dir {folder}: {holder} trains in it; two drivers would spoil each other's "
                "run. Wait until it has ended, or name another run_dir. If there is no such "
                f"process any more, delete {path}"
            )
        if not told:
            logger.warning("%s: %s has it; waiting for %g s at most", path, holder, LOCK_WAIT_S)
            told = True
        time.sleep(LOCK_POLL_S)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _LOCKS[folder] = file


def _holder_of(file: TextIO) -> str | None:
    """Takes the lock, or answers who has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read() or "another process"
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s)", file.name, error)
    return None


def _has_run(folder: Path) -> bool:
    """Whether a run has come so far there that something would be lost."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(list_states(folder))


def _finished_iterations(folder: Path) -> int | None:
    """Iterations of the run when it was last finished: last evaluation and summary written."""
    summary = folder / "summary.json"
    if not summary.exists():
        return None
    try:
        return int(json.loads(summary.read_text(encoding="utf-8"))["iterations"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{summary}: not readable as a run's summary: {error}; remove it: a run that is at its "
            "last iteration then evaluates, and writes it, again"
        ) from error


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
