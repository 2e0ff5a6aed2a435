"""HPS-v2 / v2.1 by the hpsv2 package's own code, in a Python of its own, asked through a pipe.

The package cannot live beside Ray. It scores picture by picture and is many times slower than
``hps``, which gives the same numbers.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from threading import Timer
from typing import Any

from pydantic import Field

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError, Tensor

CHILD = Path(__file__).with_name("hpsv2_child.py")
TAIL_CHARACTERS = 600


class Hpsv2Scorer(RewardScorer):
    """``hpsv2.img_score.score`` in a child process; one that fails is started anew when asked."""

    class Options(Section):
        python: str
        """The environment's Python; ``python -m g2rpo_ray.rewards.scorers.isolated hpsv2 FOLDER``
        makes the environment and prints this path."""
        checkpoint: str
        """``HPS_v2.1_compressed.pt`` or another file of ``{'state_dict': ...}``."""
        architecture: str = "ViT-H-14"
        """Name of a model that hpsv2 knows."""
        architecture_config: str | None = None
        """JSON file of another model, named ``<architecture>.json``."""
        timeout_s: float = Field(600.0, gt=0)
        """Longest wait for the process to load, and to take a request and answer it."""

    kind = "hpsv2"

    @classmethod
    def check_files(cls, options: Options) -> None:
        from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict

        load_state_dict(resolve_path(options.checkpoint), "meta")

    def __init__(self, options: Options, device: str) -> None:
        import torch

        self._child: subprocess.Popen[bytes] | None = None
        checkpoint, config = resolve_path(options.checkpoint), options.architecture_config
        if not checkpoint.is_file():
            raise ScorerError(f"{checkpoint}: no such checkpoint file")
        # Not resolved: a virtual environment's Python is a link, and is known by where it lies.
        python = Path(options.python).absolute()
        if not python.is_file():
            raise ScorerError(
                f"{python}: no such Python; make the environment with python -m "
                "g2rpo_ray.rewards.scorers.isolated"
            )
        settings = {
            "checkpoint": str(checkpoint),
            "architecture": options.architecture,
            "config": None if config is None else str(resolve_path(config)),
            "device": device,
            # What else ``compute_the_same_bits`` does here goes on with the environment.
            "deterministic": torch.backends.cudnn.deterministic,
        }
        # -I: neither this folder nor PYTHONPATH may shadow what the other environment has.
        self._command = [str(python), "-I", str(CHILD), json.dumps(settings)]
        self._timeout_s = options.timeout_s
        self._start()

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        if self._child is None:
            self._start()
        data = pictures.contiguous().numpy().tobytes()
        with self._limited():
            # Plain texts: metadata are of a class that the other environment lacks.
            self._pipe.send((data, list(pictures.shape), [*map(str, prompts)]))
            scores = self._answer()["scores"]
        return torch.tensor(scores, dtype=torch.float32)

    def __del__(self) -> None:
        self._end()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        self._pipe, theirs = Pipe()
        with theirs:
            end = theirs.fileno()
            self._child = subprocess.Popen(
                [*self._command, str(end)], stdout=self._log, stderr=self._log, pass_fds=[end]
            )
        with self._limited():
            self._answer()

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """A child that does not read stops the writing, as one that is silent stops the reading."""
        assert self._child is not None
        timer = Timer(self._timeout_s, self._child.kill)
        end_s = time.monotonic() + self._timeout_s
        timer.start()
        try:
            yield
        except (EOFError, OSError) as error:
            is_late = time.monotonic() >= end_s
            what = f"gave no answer within {self._timeout_s:g} s" if is_late else "ended"
            raise self._failure(what) from error
        finally:
            timer.cancel()

    def _answer(self) -> dict[str, Any]:
        # JSON: what comes back is not unpickled.
        answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        if "error" in answer:
            raise ScorerError(f"{CHILD.stem}: {answer['error']}")
        return answer

    def _failure(self, what: str) -> ScorerError:
        self._end()
        self._log.seek(0)
        tail = self._log.read().decode("utf-8", "replace")[-TAIL_CHARACTERS:].strip()
        return ScorerError(f"{CHILD.stem}: its process {what}; its last output: {tail or 'none'}")

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
