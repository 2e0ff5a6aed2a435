"""What a private Ray needs of this machine: a folder for its sockets, shared memory, a token."""

import errno
import logging
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from ray._private.authentication import authentication_token_setup
from ray.exceptions import AuthenticationError

from g2rpo_ray.cluster.demand import ClusterError

SOCKET_BYTES = 107
"""The longest path of a socket that Linux takes."""
LONGEST_SOCKET = "session_2026-11-29_00-57-44_208416_4194304/sockets/plasma_store"
"""What Ray adds to its folder: the time, a process id (the largest there is), a name."""
PYTHON_SOCKET = "pymp-01234567/listener-01234567"
"""What Python's multiprocessing, and with it Ray's dashboard, adds to TMPDIR."""
SHORT_FOLDERS = (Path("/tmp/ray"), Path(f"/tmp/ray-{os.getuid()}"))
"""Ray's own default, and one of this user, who may not be allowed to write another's."""
SHARED_MEMORY = Path("/dev/shm")


class PrivateRayError(ClusterError):
    """Ray cannot start on this machine."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}. {remedy[0].upper()}{remedy[1:]}")
        self.what, self.remedy = what, remedy


def ray_folder() -> tuple[Path, str]:
    """Where a private Ray keeps its sessions; and why not where TMPDIR says, else nothing.

    Raises:
        PrivateRayError: RAY_TMPDIR cannot be used; or it is not set, and no folder can be.
    """
    given = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")
    folders = [Path(os.environ[given]).expanduser().absolute() / "ray"] if given else []
    if given != "RAY_TMPDIR":
        folders += [folder for folder in SHORT_FOLDERS if folder not in folders]
    reasons: list[str] = []
    for number, folder in enumerate(folders):
        if not (reason := _unusable(folder)):
            return folder, "; ".join(reasons)
        name = f"{given}={os.environ[given]}" if given and number == 0 else f"{folder}"
        reasons.append(f"{name}: {reason}")
    longest = SOCKET_BYTES - len(f"/ray/{LONGEST_SOCKET}")
    raise PrivateRayError(
        f"Ray has no folder for its sockets and logs: {'; '.join(reasons)}",
        f"set RAY_TMPDIR to a folder of at most {longest} bytes that you may write",
    )


def shorten_tmpdir(folder: Path) -> str:
    """Give the processes of a private Ray a TMPDIR beside its folder, where theirs is too long.

    Returns:
        What to tell of it; empty where TMPDIR stays as it is.
    """
    size = len(os.fsencode(f"{os.environ.get('TMPDIR', '')}/{PYTHON_SOCKET}"))
    if size <= SOCKET_BYTES:
        return ""
    os.environ["TMPDIR"] = str(folder.parent)
    return (
        f"TMPDIR is {folder.parent} for this command and its roles: sockets' paths in the one that "
        f"was given would have {size} bytes, the limit is {SOCKET_BYTES}"
    )


def _unusable(folder: Path) -> str:
    """Why Ray could not work there; empty if it could."""
    size = len(os.fsencode(folder / LONGEST_SOCKET))
    if size > SOCKET_BYTES:
        return f"its sockets' paths would have {size} bytes, the limit is {SOCKET_BYTES}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            TemporaryDirectory(dir=folder) as probe,
            socket.socket(socket.AF_UNIX) as one,
            TemporaryFile(dir=probe) as file,
        ):
            # Not every network file system has sockets; a full disk has no room for logs.
            one.bind(f"{probe}/socket")
            file.write(bytes(2**20))
            file.flush()
    except OSError as error:
        return f"cannot be used: {error}"
    return ""


def check_shared_memory() -> None:
    """The object store lies there. Where it is only too small, Ray says so and takes a disk.

    Raises:
        PrivateRayError: it cannot be written.
    """
    try:
        with TemporaryFile(dir=SHARED_MEMORY):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise PrivateRayError(
                f"{SHARED_MEMORY}, where Ray keeps its objects, cannot be written: {error}",
                "mount it so that you may write there (a tmpfs; docker run --shm-size)",
            ) from error


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    return "authentication is enabled" not in record.getMessage()


def ensure_token() -> None:
    """Do what ``ray.init`` does next, with an error that says what to set.

    Raises:
        PrivateRayError: there is no token, and none can be kept.
    """
    # A warning that nothing is wrong: docs/security.md has what Ray does with the token.
    logging.getLogger(authentication_token_setup.__name__).addFilter(_is_no_false_alarm)
    try:
        authentication_token_setup.enable_token_auth_by_default()
        authentication_token_setup.ensure_token_if_auth_enabled()
    except (OSError, RuntimeError) as error:
        raise PrivateRayError(
            f"Ray keeps a token in ~/.ray/auth_token, and HOME={os.environ.get('HOME', '')} does "
            f"not let it: {error}",
            "set HOME to a folder that you may write, or RAY_AUTH_TOKEN_PATH to a file with a "
            "token (openssl rand -hex 32), or RAY_AUTH_MODE=disabled (docs/security.md)",
        ) from error
    except AuthenticationError as error:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
        raise PrivateRayError(
            f"RAY_AUTH_TOKEN_PATH={path} is no file with a token: {str(error).splitlines()[0]}",
            "write a token there (openssl rand -hex 32), or unset RAY_AUTH_TOKEN_PATH",
        ) from error
