"""Files: written whole or not at all, read with a named error, and told apart by a checksum."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.common.formatting import format_size

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


class DiskError(RunError):
    """A disk is full, read-only or broken; the message names the file and what is free."""


def disk_fault(error: BaseException | None) -> str | None:
    """``No space left on device`` or the like, where that is behind an error, of whatever library.

    safetensors' is no OSError, and what comes from another process is text.
    """
    while error is not None:
        for number in DISK_FAULTS:
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                return os.strerror(number)
        if "OutOfDiskError" in type(error).__name__:  # also as a task's: RayTaskError(...)
            return "Ray's object store and the disk that it spills to are full"
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def writing(path: Path, refused: type[InputError] | None = None, asked: str = "") -> Iterator[None]:
    """Around what any library writes to ``path``, a file or a folder.

    Args:
        refused: for what is no fault of the disk: no permission, a file where a folder should be.
        asked: setting or option that names ``path``.

    Raises:
        DiskError: the disk is full or read-only.
        refused: the system allows no writing there; without it its own error is left as it is.
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        fault, named, free = disk_fault(error), f"{asked} {path}".lstrip(), free_bytes(path)
        if fault is None and isinstance(error, RuntimeError) and not free:
            fault = os.strerror(errno.ENOSPC)  # torch.save says no more than that it failed
        if fault is not None:
            room = "" if free is None else f"; {format_size(free)} are free there"
            raise DiskError(
                f"{named}: cannot be written: {fault}{room}. What was whole before is kept"
            ) from error
        # safetensors' says "(os error 13)".
        if refused is None or not (isinstance(error, OSError) or "(os error " in str(error)):
            raise
        raise refused(f"{named}: cannot be written: {cause_of(error, path)}") from error


@contextmanager
def sole_writer(folder: Path, refused: type[InputError], asked: str) -> Iterator[None]:
    """Around work of minutes that ends in ``folder``, which is made where there is none: inside,
    it is this command's alone. Of two at once, one would delete what the other still needs.

    Raises:
        refused: another command writes there; else, before anything is done, as of ``writing``.
    """
    with writing(folder, refused, asked):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not try_lock(descriptor):
            raise refused(
                f"{asked} {folder}: another command writes there now; wait until it has ended, or "
                "name another folder"
            )
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file or folder, kept until it is closed, if nobody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # This file system has no locks.
    return True


def is_locked(path: Path) -> bool:
    """Whether a ``sole_writer`` is at work in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` for a library to write, which takes its place when it is whole.

    Raises:
        DiskError: the disk is full or read-only; ``path`` is as it was.
    """
    # A name of its own: several processes may write the same file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            yield temporary
            flush(temporary)
            temporary.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            # Who reads it knows the file that was asked for.
            error.filename, error.filename2 = str(path), None
        with suppress(OSError):
            temporary.unlink()
        raise


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` whole or not at all; errors as of ``replacing``."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk: some say only then that they are full."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_room(folder: Path, size_bytes: int, what: str) -> None:
    """Before something large is made.

    Raises:
        DiskError: the disk of ``folder``, which need not be there yet, has less room, or what is
            there takes no files.
    """
    free = free_bytes(folder)
    if free is None:
        there = nearest_folder(folder)
        # What it takes must be tried.
        try:
            with TemporaryFile(dir=there):
                return
        except OSError as error:
            raise DiskError(
                f"{folder}: nothing can be written there: the file system of {there} takes no "
                f"files ({error.strerror}); name a folder on another one"
            ) from error
    if size_bytes > free:
        raise DiskError(
            f"{folder}: {what} takes {format_size(size_bytes)}, and {format_size(free)} are free "
            "there; free some, or name a folder on another disk"
        )


def free_bytes(path: Path) -> int | None:
    """Of the disk that it lies or would lie on; None: the file system is the kernel's own
    (``/proc``), or one that does not say."""
    usage = shutil.disk_usage(nearest_folder(path))
    return usage.free if usage.total else None


def nearest_folder(path: Path) -> Path:
    """Of it and the folders that it lies in, the first that is there."""
    # Path.exists raises where a name is too long, or a folder on the way may not be looked into.
    folders = (path, *path.absolute().parents)
    return next(folder for folder in folders if os.path.exists(folder))  # noqa: PTH110


def cause_of(error: BaseException, path: object) -> str:
    """What went wrong with a file, for a message that names it: not once more."""
    if isinstance(error, OSError) and error.strerror and str(error.filename) == str(path):
        return error.strerror
    # safetensors' errors have no ``filename``.
    return str(error).removesuffix(f": {path}")


def files_under(folder: Path, most: int | None = None) -> list[Path]:
    """Files in a folder and in those below it, relative to it and sorted, without hidden ones.

    Args:
        most: after so many it stops, and there are more.

    Raises:
        OSError: a folder below it cannot be read, which ``Path.rglob`` passes over.
    """

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [Path(place, name) for name in names if not name.startswith(".")]
        found += [file.relative_to(folder) for file in files if file.is_file()]
        if most is not None and len(found) > most:
            break
    return sorted(found)


def name_text(name: str) -> str:
    """A file's name as text that can be written: bytes that are no UTF-8 as ``\\xe9``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def whole_lines(path: Path) -> list[bytes]:
    """Lines of a file that a killed command goes on in, where there is one; of half a line at its
    end, or half a character, the file is rid."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    return whole.split(b"\n")[:-1]


def read_json_object(
    path: Path, error: type[Exception], remedy: str = "copy or fetch the file again"
) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Args:
        remedy: what to do where it does not.

    Raises:
        error: it is missing, cannot be read as JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise error(f"{path}: not readable as JSON: {cause_of(cause, path)}; {remedy}") from cause
    if not isinstance(content, dict):
        raise error(f"{path}: expected a JSON object; {remedy}")
    return content


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
