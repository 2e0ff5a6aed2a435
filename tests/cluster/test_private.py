"""A private Ray that cannot start says which variable or folder is at fault, before it tries."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import ray

from g2rpo_ray.cluster import connect, private
from g2rpo_ray.cluster.private import LONGEST_SOCKET, PrivateRayError, ray_folder
from g2rpo_ray.doctor.examine import examine
from tests.tiny import tiny_config

LONG = "slurm_scratch_of_job_" * 5


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose path is short, unlike pytest's own; Ray's default lies in it."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(private, "SHORT_FOLDERS", (folder / "ray", folder / "ray-me"))
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    yield folder
    shutil.rmtree(folder)


def test_the_folder_is_rays_own_unless_something_else_is_asked_for(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray_folder() == (short / "ray", "")
    monkeypatch.setenv("TMPDIR", str(short / "mine"))
    assert ray_folder() == (short / "mine/ray", "")
    monkeypatch.chdir(short)
    monkeypatch.setenv("RAY_TMPDIR", "theirs")
    assert ray_folder() == (short / "theirs/ray", ""), "Ray itself hangs with a relative path"
    monkeypatch.setenv("RAY_TMPDIR", "")
    assert ray_folder() == (short / "mine/ray", "")


@pytest.mark.parametrize("place", [LONG, "file"])
def test_a_tmpdir_that_cannot_be_used_is_passed_over_with_its_reason(
    short: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (short / "file").touch()
    monkeypatch.setenv("TMPDIR", str(short / place))
    folder, reason = ray_folder()
    assert folder == short / "ray"
    assert f"TMPDIR={short / place}: " in reason
    size = len(f"{short}/{LONG}/ray/{LONGEST_SOCKET}")
    assert {
        LONG: f"its sockets' paths would have {size} bytes, the limit is 107",
        "file": "cannot be used: [Errno 20] Not a directory",
    }[place] in reason
    # Another user's /tmp/ray, which this one may not write.
    (short / "ray").rmdir()
    (short / "ray").touch()
    assert ray_folder()[0] == short / "ray-me"


def test_the_longest_path_that_is_allowed_has_room_for_every_socket(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 107 - len(f"/ray/{LONGEST_SOCKET}")
    fits = f"{short}/".ljust(longest, "x")
    monkeypatch.setenv("RAY_TMPDIR", fits)
    assert ray_folder() == (Path(fits) / "ray", "")
    monkeypatch.setenv("RAY_TMPDIR", fits + "x")
    with pytest.raises(PrivateRayError, match=rf"RAY_TMPDIR to a folder of at most {longest} byte"):
        ray_folder()


def test_rays_processes_get_a_tmpdir_that_has_room_for_their_sockets(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("check_shared_memory", "ensure_token"):
        monkeypatch.setattr(connect, name, lambda: None)
    longest = f"{short}/".ljust(107 - len("/pymp-01234567/listener-01234567"), "x")
    monkeypatch.setenv("TMPDIR", longest)
    assert connect._prepare_machine() == str(short / "ray")
    assert os.environ["TMPDIR"] == longest
    assert "Ray's folder is" in capsys.readouterr().err
    for variable, ray_at in (("TMPDIR", "ray"), ("RAY_TMPDIR", "mine/ray")):
        monkeypatch.setenv(variable, str(short / "mine"))
        monkeypatch.setenv("TMPDIR", longest + "x")
        assert connect._prepare_machine() is None, "what Ray takes by itself then"
        assert os.environ["TMPDIR"] == str((short / ray_at).parent)
        assert ray_folder() == (short / ray_at, "")
        assert "would have 108 bytes, the limit is 107" in capsys.readouterr().err


@pytest.mark.usefixtures("ray_cluster")
def test_rays_own_sockets_are_no_longer_than_that() -> None:
    node: Any = ray._private.worker.global_worker.node
    for name in (node.plasma_store_socket_name, node.raylet_socket_name):
        assert len(name) <= len(f"{node.get_temp_dir_path()}/{LONGEST_SOCKET}")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("value", [f"/tmp/{LONG}", "/proc/none"])
def test_a_ray_tmpdir_that_cannot_be_used_is_named_by_train_and_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", value)
    settings = tiny_config(tmp_path).cluster
    with (
        pytest.raises(PrivateRayError, match=f"RAY_TMPDIR={value}.*Set RAY_TMPDIR to a folder"),
        connect.ray_cluster(settings),
    ):
        pytest.fail("started")
    [finding] = [finding for finding in examine(None) if finding.check == "cluster"]
    assert f"RAY_TMPDIR={value}: " in finding.what
    assert finding.remedy.startswith("set RAY_TMPDIR to a folder of at most")


def test_shared_memory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(PrivateRayError, match=r"none, where Ray keeps its objects.*tmpfs"):
        private.check_shared_memory()

    def full(**_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(private, "TemporaryFile", full)
    private.check_shared_memory()  # Ray takes a disk, and says so


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HOME": "/proc/none"}, "HOME=/proc/none does not let it: [Errno 2]"),
        ({"HOME": "/proc/none"}, "RAY_AUTH_TOKEN_PATH to a file with a token"),
        ({"RAY_AUTH_TOKEN_PATH": "/no/token"}, "RAY_AUTH_TOKEN_PATH=/no/token is no file with a"),
        ({"HOME": "/proc/none", "RAY_AUTH_MODE": "disabled"}, "there is nothing to say"),
    ],
)
def test_a_token_that_cannot_be_kept_or_read(variables: dict[str, str], named: str) -> None:
    # In a process of its own: Ray reads these variables once.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    code = (
        "from g2rpo_ray.cluster.private import PrivateRayError, ensure_token\n"
        "try: ensure_token(); print('there is nothing to say')\n"
        "except PrivateRayError as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], env=kept | variables, capture_output=True, text=True
    )
    assert named in told.stdout, told.stderr


@pytest.mark.usefixtures("short")
def test_a_bare_exception_of_rays_start_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> NoReturn:
        raise Exception("The current node timed out during startup.")  # as Ray 2.60 does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connect, "ensure_token", lambda: None)
    monkeypatch.setattr(ray, "init", fail)
    with (
        pytest.raises(PrivateRayError, match=r"did not start .*: The current node timed out.*logs"),
        connect.ray_cluster(tiny_config(tmp_path).cluster),
    ):
        pytest.fail("started")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("given", [None, "1"])
def test_ray_starts_no_workers_ahead_unless_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    seen: list[str | None] = []
    name = "RAY_prestart_worker_first_driver"

    def start(**_: object) -> NoReturn:
        seen.append(os.environ.get(name))
        raise ValueError("not here")

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(connect, "ensure_token", lambda: None)
    monkeypatch.setattr(ray, "init", start)
    with (
        pytest.raises(PrivateRayError, match="not here"),
        connect.ray_cluster(tiny_config(tmp_path).cluster),
    ):
        pytest.fail("started")
    assert seen == [given or "0"]


def test_a_node_that_is_late_on_a_busy_machine_is_started_once_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left: list[subprocess.Popen] = []

    def start() -> None:
        if not left:
            left.append(subprocess.Popen(["sleep", "60"]))
            raise Exception("The current node timed out during startup.")

    connect.start_again_if_late(start)
    assert left[0].wait(timeout=60) == -signal.SIGKILL
    assert "once more" in capsys.readouterr().out

    def broken() -> NoReturn:
        raise ValueError("another reason")

    with pytest.raises(ValueError, match="another reason"):
        connect.start_again_if_late(broken)
