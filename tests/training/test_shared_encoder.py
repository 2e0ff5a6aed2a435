"""Training and an evaluation beside it ask one real encoder, which is slow: who waits for whom."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
import torch

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.rollout.answers import HeldoutPictures
from g2rpo_ray.run.folder import open_run
from g2rpo_ray.training import roles as roles_module
from g2rpo_ray.training.heldout import HeldoutEvaluation
from g2rpo_ray.training.roles import Encoder
from g2rpo_ray.training.session import Session
from g2rpo_ray.training.trainer import Trainer
from tests.tiny import CAPTIONS, encode, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

SLOW_S = 1.0
"""Of a held-out prompt."""
HELDOUT = [f"a red circle {number}" for number in range(40)]
NOT_EMBEDDED = "prompts.max_sequence_length=9"
"""Embeddings that ship with the tiny world's prompts have another length."""
DONE = "heldout_done"
ITERATIONS = 6
BUSY_S = 2.3
"""What an iteration does beside waiting for its prompts: no multiple of ``SLOW_S``."""


class EvaluationPool:
    """Waits for its prompts, and keeps what it got."""

    def __init__(self) -> None:
        self.embeds: list[Conditioning] = []

    def sync(self, _send: Any) -> None:
        pass

    def evaluate(self, prompts: Sequence[ray.ObjectRef], on_wait: Any) -> list[HeldoutPictures]:
        for done, prompt in enumerate(prompts):
            on_wait(done, len(prompts))
            self.embeds.append(ray.get(prompt).embeds)
        return []


class TrainingPool:
    """Draws nothing; counts the held-out prompts that were done while it waited for its own."""

    def __init__(self, heldout_done: Callable[[], int]) -> None:
        self._heldout_done = heldout_done
        self.overtaken: list[int] = []
        self.embeds: dict[str, Conditioning] = {}

    def generate(
        self, prompts: Sequence[ray.ObjectRef], _iteration: int, _on_wait: Any
    ) -> tuple[list[Any], list[Any]]:
        before = self._heldout_done()
        got = ray.get(list(prompts))
        self.overtaken.append(self._heldout_done() - before)
        self.embeds |= {prompt.text: prompt.embeds for prompt in got}
        time.sleep(BUSY_S)
        return [], []


@pytest.fixture
def encoder(tmp_path: Path) -> Iterator[Encoder]:
    """A real one, slowed down where it encodes a held-out prompt: a line in a file for each."""
    done = tmp_path / DONE
    done.touch()

    def slow_down(actor: Any) -> None:
        fast = actor._encoder.encode_heldout

        def slow(number: int, text: str) -> Any:
            time.sleep(SLOW_S)
            with done.open("a") as lines:
                lines.write(f"{number}\n")
            return fast(number, text)

        actor._encoder.encode_heldout = slow

    config = tiny_config(tmp_path / "run", NOT_EMBEDDED)
    with roles_module._encoder(config, None, [tmp_path / "embeddings"]) as encoder:
        ray.get(encoder.actor.__ray_call__.remote(slow_down))
        # Loads the text encoders.
        ray.get(encoder.training([(0, "a cross")]))
        yield encoder


def test_training_waits_for_no_heldout_prompt(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g2rpo_ray.training.trainer.Activity", MagicMock())
    config = tiny_config(
        tmp_path / "run",
        NOT_EMBEDDED,
        f"iterations={ITERATIONS}",
        f"sampling.prompts_per_iteration={len(CAPTIONS)}",
        f"evaluation.prompts={len(HELDOUT)}",
        "evaluation.workers=1",
    )
    beside = EvaluationPool()
    training = TrainingPool(lambda: len((tmp_path / DONE).read_text().splitlines()))
    roles: Any = SimpleNamespace(
        encoder=encoder,
        pool=training,
        evaluation_pool=beside,
        tflop=0.01,
        weights_of_now=lambda _timeout_s: SimpleNamespace(send=None),
    )
    session = Session(config, open_run(config, "none"), CAPTIONS, HELDOUT)
    session.progress = session.log = MagicMock()
    trainer = Trainer(session, roles)
    trainer.heldout.evaluate(0)
    for iteration in range(ITERATIONS):
        trainer.draw(iteration)
    evaluation: HeldoutEvaluation = trainer.heldout
    try:
        # The one that was begun may be done first; the later iterations' prompts are there by then,
        # so that only chance lets one end in the moment of asking.
        assert training.overtaken[0] <= 2, training.overtaken
        assert sum(training.overtaken[1:]) <= 2, training.overtaken
        # It goes on all the time, and is not done before the training.
        done, total = evaluation._beside.progress if evaluation._beside else (0, 0)
        assert 0 < done < total == len(HELDOUT)
        wanted = {prompt.text: prompt.embeds for prompt in encode(config, CAPTIONS)}
        assert all(torch.equal(e["t5"], wanted[text]["t5"]) for text, e in training.embeds.items())
        heldout = encode(config, HELDOUT[:done])
        assert all(
            torch.equal(found["t5"], prompt.embeds["t5"])
            for found, prompt in zip(beside.embeds, heldout, strict=False)
        )
    finally:
        evaluation.close()
