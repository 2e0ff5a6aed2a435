"""Files of any library on a full or read-only disk: one named error, nothing half-written."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from PIL import Image
from safetensors.torch import save_file

from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.common.files import (
    DiskError,
    check_room,
    disk_fault,
    read_json_object,
    replace_text,
    replacing,
    writing,
)
from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import load_config
from g2rpo_ray.learner.checkpoints.format import read_info
from g2rpo_ray.plan.costs import load_costs
from g2rpo_ray.prompts.embeddings import Embeddings
from g2rpo_ray.prompts.reading import read_prompts
from tests.disks import left, make_read_only, small_disk

NOISE = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)


def fail_without_a_number(path: Path) -> None:
    try:
        path.write_bytes(NOISE.tobytes())
    except OSError as error:
        raise ValueError("could not be encoded") from error


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("a" * 200_000),
    "safetensors": lambda path: save_file({"a": torch.zeros(50_000)}, path),
    "torch.save": lambda path: torch.save(torch.zeros(50_000), path),
    "PNG": lambda path: Image.fromarray(NOISE).save(path, "PNG"),
    "JPEG": lambda path: Image.fromarray(NOISE).save(path, "JPEG", quality=100),
    "parquet": lambda path: pq.write_table(pa.table({"a": NOISE.flatten()}), path),
    "a cause": fail_without_a_number,
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "96k") as folder:
        yield folder


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_and_the_old_file_stays_whole(disk: Path, writer: str) -> None:
    (disk / "kept").write_text("old")
    with (
        pytest.raises(DiskError, match=rf"{disk}/kept: cannot be written: No space left on device"),
        replacing(disk / "kept") as temporary,
    ):
        WRITERS[writer](temporary)
    assert (disk / "kept").read_text() == "old"
    assert left(disk) == {"kept"}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_read_only_disk_is_named(disk: Path, writer: str) -> None:
    make_read_only(disk)
    with (
        pytest.raises(DiskError, match=rf"{disk}/new: cannot be written: Read-only file system"),
        replacing(disk / "new") as temporary,
    ):
        WRITERS[writer](temporary)
    assert not left(disk)


@pytest.mark.parametrize("writer", WRITERS)
def test_what_has_room_is_written_as_by_the_library_itself(tmp_path: Path, writer: str) -> None:
    with replacing(tmp_path / "new") as temporary:
        WRITERS[writer](temporary)
    WRITERS[writer](tmp_path / "plain")
    assert left(tmp_path) == {"new", "plain"}
    # torch.save keeps the file's name in it.
    if writer != "torch.save":
        assert (tmp_path / "new").read_bytes() == (tmp_path / "plain").read_bytes()


def test_an_error_inside_leaves_the_old_file(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "old")
    with pytest.raises(TypeError), replacing(tmp_path / "a") as temporary:
        json.dump(["half", print], temporary.open("w"))
    assert (tmp_path / "a").read_text() == "old"
    assert left(tmp_path) == {"a"}


def test_what_is_no_fault_of_the_disk_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(ConfigError, match=r"file: cannot be written: .*exists"),
        writing(tmp_path / "file", ConfigError),
    ):
        (tmp_path / "file").mkdir()
    with pytest.raises(FileExistsError), writing(tmp_path / "file"):
        (tmp_path / "file").mkdir()
    for own in (InputError("a"), RunError("b"), ValueError("c"), RuntimeError("d")):
        with pytest.raises(type(own)) as caught, writing(tmp_path, ConfigError):
            raise own
        assert caught.value is own


READERS: dict[str, Callable[[Path], object]] = {
    "settings": load_config,
    "costs": load_costs,
    "JSON": lambda path: read_json_object(path, ConfigError),
    "prompts": lambda path: read_prompts(path, None),
    "a checkpoint": lambda path: read_info(path.parent),
    "embeddings": lambda path: Embeddings(path.parent),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path, reader: str) -> None:
    """A link that leads to itself: nobody, root neither, can open it."""
    names = {"a checkpoint": "state.json", "embeddings": "manifest.json"}
    path = tmp_path / names.get(reader, "file")
    path.symlink_to(path)
    with pytest.raises(InputError) as caught:
        READERS[reader](path)
    assert str(caught.value).count(str(path)) == 1


def test_an_error_of_another_process_is_recognised_by_its_text() -> None:
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert disk_fault(quota) == "Disk quota exceeded"
    assert disk_fault(RuntimeError("ray::f() OSError: [Errno 28] No space left on device"))
    spilled = ray.exceptions.OutOfDiskError("x")
    of_a_task = ray.exceptions.RayTaskError("f", "Traceback ...", spilled).as_instanceof_cause()
    for error in (spilled, of_a_task):
        assert "spills" in (disk_fault(error) or "")
    for other in (None, ValueError("no space"), PermissionError(13, "Permission denied")):
        assert disk_fault(other) is None


def test_room_is_asked_for_before_anything_is_there(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path / "new" / "folder", free // 2, "it")
    check_room(tmp_path / ("x" * 300) / "folder", free // 2, "it")
    with pytest.raises(DiskError, match=r"new/folder: it takes \d.* and \d.* are free there"):
        check_room(tmp_path / "new" / "folder", 2 * free, "it")
    assert not left(tmp_path)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc here")
def test_a_file_system_that_takes_no_files_is_not_called_full() -> None:
    with pytest.raises(DiskError, match=r"^/proc/x/y: nothing can be written there: .* /proc t"):
        check_room(Path("/proc/x/y"), 10, "it")


def test_a_file_system_that_does_not_say_its_size_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = shutil.disk_usage(tmp_path)._replace(total=0, used=0, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: silent)
    check_room(tmp_path / "new" / "folder", 10, "it")
    assert not left(tmp_path)
