"""The run folder: writable on every node, the same folder on all of them, with space left."""

import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import ray
from ray.actor import ActorHandle

from g2rpo_ray.common.files import free_bytes
from g2rpo_ray.config import Config
from g2rpo_ray.doctor.findings import Finding, fail, ok, warn
from g2rpo_ray.doctor.probe import ask
from g2rpo_ray.learner.checkpoints.folders import SNAPSHOTS_KEPT
from g2rpo_ray.models.loading import ModelFolderError
from g2rpo_ray.plan.memory import state_bytes
from g2rpo_ray.plan.networks import policy_size
from g2rpo_ray.run.paths import run_folder

WRITE_MIB = 64


def check_storage(config: Config, probes: Mapping[str, ActorHandle]) -> list[Finding]:
    """Every node writes a file and looks for the others'."""
    run_dir = run_folder(config)
    parent = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    folder = parent / f".g2rpo-doctor-{uuid.uuid4().hex[:8]}"
    remedy = (
        f"run_dir must lie on storage that every node mounts and may write, as the same user; "
        f"looked at {parent}"
    )
    try:
        written, findings = ask(probes, "storage", remedy, _write, folder)
        writers = {name: probes[name] for name in written}
        seen, unseen = ask(writers, "storage", remedy, _names, folder)
        findings += unseen
        for name, names in (seen | {"the driver": _names(folder)}).items():
            hidden = [other for other, (file, _) in written.items() if file not in names]
            if hidden:
                what = f"{name} does not see what {', '.join(hidden)} wrote"
                findings.append(fail("storage", what, remedy))
    finally:
        ask(probes, "", remedy, shutil.rmtree, folder, True, timeout_s=30)
        shutil.rmtree(folder, ignore_errors=True)
    if not findings:
        speeds = [WRITE_MIB / max(seconds, 1e-6) for _, seconds in written.values()]
        what = f"{parent}: every node reads and writes it, {min(speeds):.0f} MiB/s at least"
        findings.append(ok("storage", what))
    return [*findings, check_space(config, parent)]


def _write(folder: Path) -> tuple[str, float]:
    """Name of the file that this node wrote, zeros, and seconds until they were on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    file, started_s = folder / ray.get_runtime_context().get_node_id(), time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(WRITE_MIB):
            stream.write(bytes(2**20))
        os.fsync(stream.fileno())
    return file.name, time.perf_counter() - started_s


def _names(folder: Path) -> set[str]:
    """Files of a folder, as this node sees them."""
    # Listing makes a network file system ask its server again.
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def check_space(config: Config, folder: Path) -> Finding:
    """Room for the states that are kept, and the one being written."""
    free = free_bytes(folder)
    room = "free space not known"
    if free is not None:
        room = f"{free / 2**30:.1f} GiB free"
    try:
        trained = policy_size(config).trained_parameters
    except ModelFolderError as error:
        what = f"{folder}: {room}; what checkpoints want is unknown: {error}"
        return warn("space", what, "mend model.path, and ask again")
    states = most_states(config)
    wanted_gib = states * trained * state_bytes(config) / 2**30
    what = (
        f"{folder}: {room}, checkpoints want up to {wanted_gib:.1f} GiB "
        f"({states} states, snapshots included)"
    )
    if free is None:
        return warn("space", what, "/proc and the like take no files: name a run_dir on a disk")
    if free / 2**30 < wanted_gib:
        return fail("space", what, "free some, keep fewer (checkpoint.keep_last), or move run_dir")
    if free / 2**30 < 2 * wanted_gib:
        return warn("space", what, "it may not last: metrics, pictures and logs come on top")
    return ok("space", what)


def most_states(config: Config) -> int:
    """Checkpoints and snapshots that lie on the disk at the same time, at most."""
    settings, writing = config.checkpoint, 1
    snapshots = SNAPSHOTS_KEPT if settings.snapshot_every else 0
    # One that is under evaluation may become the best: it is kept, too.
    best = 0 if settings.best is None else 1 + bool(config.evaluation.workers)
    return settings.keep_last + best + snapshots + writing
