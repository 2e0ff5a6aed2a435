"""Several prompts drawn at once: what each asks of a network is done in one pass for all.

A card is done with a small network's kernels sooner than they are started, so a pass of four
prompts takes hardly longer than one of a single prompt. Each prompt is drawn by
``RolloutWorker.rollout`` in a thread of its own, and waits where a network is to be asked until the
others ask it, too. All draw with the same algorithm on the same schedule, so they ask in step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from comparing.scoring import LocalScores, LocalScoring
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.prompts.dataset import Prompt
from g2rpo_ray.rollout.phases import OwnTime
from g2rpo_ray.rollout.worker import RolloutWorker
from g2rpo_ray.sampling.engine import RolloutEngine
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.group import RolloutGroup
from g2rpo_ray.sampling.sampler import Sampler

Work = Callable[[list[Any]], Sequence[Any]]
"""What is asked by each lane, in the lanes' order -> what each gets."""


class Meeting:
    """Where lanes wait for each other; the last to come does the work of all.

    Lanes are numbered from 0; what each asks is told in that order.
    """

    def __init__(self, lanes: int) -> None:
        self._changed = Condition()
        self._present = set(range(lanes))
        self._asked: dict[int, tuple[Work, Any]] = {}
        self._answers: dict[int, Any] = {}
        self._error: BaseException | None = None

    def ask(self, lane: int, work: Work, item: Any) -> Any:
        """``work`` on the items of all lanes that are still there; this lane's part of it.

        Raises:
            RuntimeError: another lane asks for other work, or failed in it.
        """
        with self._changed:
            self._asked[lane] = work, item
            self._do_if_all_are_here()
            self._changed.wait_for(lambda: lane in self._answers or self._error is not None)
            if self._error is not None:
                raise RuntimeError("prompts that are drawn together failed") from self._error
            return self._answers.pop(lane)

    def leave(self, lane: int) -> None:
        """It asks for nothing more."""
        with self._changed:
            self._present.discard(lane)
            self._do_if_all_are_here()

    def _do_if_all_are_here(self) -> None:
        if not self._asked or self._asked.keys() != self._present:
            return
        lanes = sorted(self._asked)
        works = {self._asked[lane][0] for lane in lanes}
        try:
            if len(works) > 1:
                raise RuntimeError(f"prompts are out of step: they ask for {works}")
            found = works.pop()([self._asked[lane][1] for lane in lanes])
            self._answers |= dict(zip(lanes, found, strict=True))
        # Told to every lane: each of them would wait for ever.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        self._asked.clear()
        self._changed.notify_all()


@dataclass(eq=False)
class LaneEvaluator:
    """An ``Evaluator`` as one lane sees it."""

    ask: Callable[[Work, Any], Any]
    evaluate_all: Work
    evaluator: Evaluator
    batch_size: int
    """The lane's share of a pass."""
    evaluations: int = 0

    @property
    def policy(self) -> Policy:
        return self.evaluator.policy

    def __call__(self, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Tensor:
        self.evaluations += len(x)
        velocity: Tensor = self.ask(self.evaluate_all, (x, sigma, embeds))
        return velocity


@dataclass
class LaneEngine:
    """A ``RolloutEngine`` as one lane sees it, in the parts that a rollout asks for."""

    ask: Callable[[Work, Any], Any]
    engine: RolloutEngine
    evaluators: list[LaneEvaluator]
    """The exact one; and that of estimates, where it is another."""
    decode_all: Work

    @property
    def batch_size(self) -> int:
        return self.evaluators[0].batch_size

    @property
    def evaluations(self) -> int:
        return sum(each.evaluations for each in self.evaluators)

    @property
    def warnings(self) -> list[str]:
        return self.engine.warnings

    @property
    def decoder(self) -> "LaneEngine":
        return self

    def sampler(self, steps: int) -> Sampler:
        """Of the engine, on its schedule, but for who evaluates."""
        sampler = self.engine.sampler(steps)
        sampler.exact, sampler.estimate = self.evaluators[0], self.evaluators[-1]  # type: ignore[assignment]
        return sampler

    def decode_on_device(self, latents: Tensor) -> Tensor:
        pictures: Tensor = self.ask(self.decode_all, latents)
        return pictures


class Later(ThreadPoolExecutor):
    """Runs what it is given when its result is asked for, in the thread that asks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _Deferred(lambda: fn(*args, **kwargs))


class _Deferred(Future[Any]):
    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self._run = run

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._run())
        return super().result(timeout)


@dataclass
class LaneScoring:
    """``Scoring`` of one lane: pictures of all lanes are scored at once."""

    ask: Callable[[Work, Any], Any]
    score_all: Work
    names: list[str]

    def submit(
        self,
        prompt_id: int,  # noqa: ARG002
        prompt: str,
        pictures: Tensor,
        names: list[str],
    ) -> LocalScores:
        scores: LocalScores = self.ask(self.score_all, (prompt, pictures, names))
        return scores


class Together:
    """A worker with scorers of its own, and what its lanes ask of its networks."""

    def __init__(self, worker: RolloutWorker) -> None:
        assert isinstance(worker.scoring, LocalScoring)
        self._worker, self.scoring = worker, worker.scoring
        exact, estimate = worker.engine.exact, worker.engine.estimate
        self._evaluators = [
            (each, partial(_evaluate_all, each)) for each in dict.fromkeys([exact, estimate])
        ]

    def rollouts(
        self, prompts: Sequence[Prompt], first_group: int, iteration: int
    ) -> list[RolloutGroup]:
        """A group of each prompt, numbered from ``first_group``: those of
        ``RolloutWorker.rollout``, but for rounding."""
        meeting = Meeting(len(prompts))

        def draw(place: int) -> RolloutGroup:
            worker = self._lane(partial(meeting.ask, place), len(prompts))
            try:
                return worker.rollout(prompts[place], first_group + place, iteration)[1]
            finally:
                meeting.leave(place)

        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(draw, range(len(prompts))))

    def _lane(self, ask: Callable[[Work, Any], Any], lanes: int) -> RolloutWorker:
        lane, whole = copy(self._worker), self._worker.engine
        evaluators = [
            LaneEvaluator(ask, evaluate_all, evaluator, max(1, evaluator.batch_size // lanes))
            for evaluator, evaluate_all in self._evaluators
        ]
        lane.engine = LaneEngine(ask, whole, evaluators, self._decode_all)  # type: ignore[assignment]
        lane.scoring = LaneScoring(ask, self._score_all, self.scoring.names)
        lane._courier, lane.own_time = Later(1), OwnTime()
        return lane

    def _decode_all(self, asked: list[Tensor]) -> Sequence[Tensor]:
        decoded = self._worker.engine.decoder.decode_on_device(torch.cat(asked))
        return decoded.split([len(latents) for latents in asked])

    def _score_all(self, asked: list[tuple[str, Tensor, list[str]]]) -> Sequence[LocalScores]:
        texts, pictures, names = zip(*asked, strict=True)
        sizes = [len(each) for each in pictures]
        each_text = [text for text, size in zip(texts, sizes, strict=True) for _ in range(size)]
        found = self.scoring.scores(torch.cat(pictures), each_text, names[0])
        parts = {name: values.split(sizes) for name, values in found.items()}
        return [LocalScores({n: parts[n][place] for n in parts}) for place in range(len(asked))]


def _evaluate_all(
    evaluator: Evaluator, asked: list[tuple[Tensor, Tensor, Conditioning]]
) -> Sequence[Tensor]:
    x, sigma, embeds = zip(*asked, strict=True)
    sizes = [len(each) for each in x]
    return evaluator(torch.cat(x), torch.cat(sigma), of_rows(embeds, sizes)).split(sizes)


def of_rows(prompts: Sequence[Conditioning], counts: Sequence[int]) -> Conditioning:
    """Of the rows of a batch, each prompt having so many of them."""
    both = list(zip(prompts, counts, strict=True))
    return Conditioning(
        {
            name: torch.cat([of[name].expand(count, *of[name].shape) for of, count in both])
            for name in prompts[0].tensors
        }
    )
