"""The loop of ``pipeline: one_step_off``: the next groups are drawn while the learner works."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from g2rpo_ray.common.stop import StopRequested
from g2rpo_ray.learner.ranks import GroupsLostError, LearnerUpdate
from g2rpo_ray.training.train import Drawn, TrainingLoop


class OneStepOffLoop(TrainingLoop):
    """As the loop it derives from, but the learner always trains on groups drawn before.

    Up to ``max_staleness`` iterations are drawn ahead, with the weights that the workers have. A
    group carries its velocities under those weights, so its old log-probabilities are theirs.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ahead: deque[Drawn] = deque()
        """Drawn and not yet trained on, oldest first."""
        self.learner_thread = ThreadPoolExecutor(1, thread_name_prefix="learner")

    def train_iteration(self) -> dict[str, float]:
        """Learn from what was drawn before, and draw ahead meanwhile."""
        started_s = time.perf_counter()
        self.stop.check()
        drawn = self.ahead.popleft() if self.ahead else self.draw(self.state.iteration)
        if self.state.weight_version - drawn.oldest_version > self.config.max_staleness:
            self.progress.note(
                f"iteration {drawn.iteration}: drawn with weights {drawn.oldest_version}, learner "
                f"has {self.state.weight_version}; dropped and drawn again (max_staleness)"
            )
            drawn = self.draw(drawn.iteration)
        learning = self.learner_thread.submit(self.roles.learner.update, drawn.groups)
        stopping = False
        try:
            self.draw_ahead(learning)
        except StopRequested:
            # What was under way is dropped; raised again once this update is recorded.
            stopping = True
        with self.stop.held():
            drawn, update = self.result_of(learning, drawn)
            report = None if stopping else self.sync()
            return self.advance(drawn, update, report, started_s)

    def result_of(
        self, learning: "Future[LearnerUpdate]", drawn: Drawn
    ) -> tuple[Drawn, LearnerUpdate]:
        """Wait for the learner; answers as ``learn``."""
        try:
            with self.phase("learn"):
                return drawn, learning.result()
        except GroupsLostError as lost:
            self.progress.note(f"{lost}; drawing iteration {drawn.iteration} again")
            return self.learn(self.draw(drawn.iteration))

    def draw_ahead(self, learning: "Future[LearnerUpdate]") -> None:
        """Draw at least one iteration, and more while the learner works and staleness allows."""
        while self.iteration_ahead < self.config.iterations:
            if len(self.ahead) >= self.config.max_staleness or (self.ahead and learning.done()):
                return
            self.ahead.append(self.draw(self.iteration_ahead))

    @property
    def iteration_ahead(self) -> int:
        """The next iteration to be drawn."""
        return self.state.iteration + 1 + len(self.ahead)
