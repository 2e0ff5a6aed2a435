"""Scorers whose package cannot live beside Ray: a Python of their own, asked through pipes.

``python -m g2rpo_ray.rewards.scorers.isolated hpsv2 FOLDER`` makes the environment of the ``hpsv2``
scorer.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from g2rpo_ray.rewards.scorer import ScorerError

HPSV2_PACKAGES = ("hpsv2==1.2.0", "clint", "args", "braceexpand", "webdataset")
"""Without their own dependencies: hpsv2 pins an old protobuf and pytest that it does not use."""
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
TAIL_CHARACTERS = 600


class ScorerProcess:
    """A child that answers every line of JSON (and the bytes after it) by a line of JSON."""

    def __init__(
        self, python: Path, script: Path, settings: dict[str, Any], timeout_s: float
    ) -> None:
        """
        Raises:
            ScorerError: no such Python, or the child did not get ready in time; with its output.
        """
        self._child: subprocess.Popen[bytes] | None = None
        # -I: neither this folder nor PYTHONPATH may shadow what the other environment has.
        self._command = [str(python), "-I", str(script), json.dumps(settings)]
        self._name, self._timeout_s = script.stem, timeout_s
        if not python.is_file():
            raise ScorerError(
                f"{python}: no such Python; make the environment with python -m "
                "g2rpo_ray.rewards.scorers.isolated"
            )
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as self)
        self._start()

    def ask(self, request: dict[str, Any], pictures: Tensor) -> Any:
        """Send pictures (uint8, contiguous on the CPU); what the child answers.

        Raises:
            ScorerError: it failed, died or was not in time; it is started anew at the next call.
        """
        if self._child is None:
            self._start()
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            header = json.dumps(request | {"shape": list(pictures.shape)})
            self._child.stdin.write(header.encode() + b"\n")
            self._child.stdin.write(pictures.contiguous().numpy().tobytes())
            self._child.stdin.flush()
        except OSError as error:
            raise self._failure("ended") from error
        return self._answer()

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def __del__(self) -> None:
        self.close()

    def _start(self) -> None:
        self._log.truncate(0)
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor, line = self._child.stdout.fileno(), b""
        deadline_s = time.monotonic() + self._timeout_s
        while not line.endswith(b"\n"):
            remaining_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([descriptor], [], [], remaining_s)[0]:
                raise self._failure(f"gave no answer within {self._timeout_s:g} s")
            piece = os.read(descriptor, 65536)
            if not piece:
                raise self._failure("ended")
            line += piece
        answer = json.loads(line)
        if "error" in answer:
            raise ScorerError(f"{self._name}: {answer['error']}")
        return answer

    def _failure(self, what: str) -> ScorerError:
        self.close()
        self._log.seek(0)
        tail = self._log.read().decode("utf-8", "replace")[-TAIL_CHARACTERS:].strip()
        return ScorerError(f"{self._name}: its process {what}; its last output: {tail or 'none'}")


def make_hpsv2_environment(folder: Path) -> Path:
    """A virtual environment with hpsv2 and its missing vocabulary; this one's packages (torch,
    torchvision, transformers) stay visible behind its own.

    Returns:
        Path of its Python.

    Raises:
        ScorerError: venv or pip failed, with pip's output.
    """
    import open_clip

    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    _run([*install, *HPSV2_PACKAGES])
    vocabulary = Path(open_clip.__file__).parent / VOCABULARY
    shutil.copyfile(vocabulary, packages / "hpsv2" / "src" / "open_clip" / VOCABULARY)
    return python


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if result.returncode != 0:
        output = (result.stdout + result.stderr)[-TAIL_CHARACTERS:]
        raise ScorerError(f"{' '.join(command)} failed: {output}")


if __name__ == "__main__":
    if sys.argv[1:2] != ["hpsv2"] or len(sys.argv) != 3:
        raise SystemExit("usage: python -m g2rpo_ray.rewards.scorers.isolated hpsv2 FOLDER")
    print(make_hpsv2_environment(Path(sys.argv[2])))
