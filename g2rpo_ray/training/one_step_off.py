"""The steps of ``pipeline: one_step_off``: the next groups are drawn while the learner works."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from g2rpo_ray.common.stop import StopRequested
from g2rpo_ray.learner.update import UpdateReport
from g2rpo_ray.models.weights import WeightReceipt
from g2rpo_ray.training.roles import Roles
from g2rpo_ray.training.session import Session
from g2rpo_ray.training.trainer import Drawn, Trainer


class OneStepOffTrainer(Trainer):
    """As the trainer it derives from, but the learner always trains on groups drawn before.

    Up to ``max_staleness`` iterations are drawn ahead, with the weights that the workers have. A
    group carries its velocities under those weights, so its old log-probabilities are theirs.
    """

    def __init__(self, session: Session, roles: Roles) -> None:
        super().__init__(session, roles)
        self.ahead: deque[Drawn] = deque()
        """Drawn and not yet trained on, oldest first."""
        self.learner_thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self.learning: Future[UpdateReport] | None = None
        """The update that was begun last, until it is asked for."""
        self.is_stopping = False

    def generate(self) -> Drawn:
        """Groups drawn before; the learner has begun with them while the next ones were drawn."""
        self.started_s = time.perf_counter()
        self.stop.check()
        drawn = self.ahead.popleft() if self.ahead else self.draw(self.iteration)
        if self.state.weight_version - drawn.oldest_version > self.config.max_staleness:
            self.session.note(
                f"iteration {drawn.iteration}: drawn with weights {drawn.oldest_version}, learner "
                f"has {self.state.weight_version}; dropped and drawn again (max_staleness)"
            )
            drawn = self.draw(drawn.iteration)
        self.learning = self.learner_thread.submit(
            self.roles.learner.update, drawn.groups, self.heldout.reward_scales
        )
        try:
            self.draw_ahead(self.learning)
        except StopRequested:
            # What was under way is dropped; raised again once this update is recorded.
            self.is_stopping = True
        return drawn

    def update(self, drawn: Drawn) -> UpdateReport:
        """Wait for what ``generate`` has begun; groups drawn anew are learned here."""
        begun, self.learning = self.learning, None
        return begun.result() if begun else super().update(drawn)

    def sync(self) -> WeightReceipt | None:
        """Not where the run is stopping: nothing is drawn any more."""
        return None if self.is_stopping else super().sync()

    def draw_ahead(self, learning: Future[UpdateReport]) -> None:
        """Draw at least one iteration, and more while the learner works and staleness allows."""
        while self.iteration_ahead < self.config.iterations:
            if len(self.ahead) >= self.config.max_staleness or (self.ahead and learning.done()):
                return
            self.ahead.append(self.draw(self.iteration_ahead))

    @property
    def iteration_ahead(self) -> int:
        """The next iteration to be drawn."""
        return self.iteration + 1 + len(self.ahead)
