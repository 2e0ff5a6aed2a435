"""``g2rpo train``: the whole run, from top to bottom.

One iteration is Algorithm 1 of arXiv 2510.01982, for each prompt of its batch:

1. Anchor: from one noise the policy walks the ODE; x_k is where its step k starts, at sigma[k].
2. Branches: at each SDE step k of a set K, x_k makes one stochastic step to x_{k+1}^m, m = 1..G,
   each with noise of its own. These G are a group: nothing but that noise sets them apart.
3. Completions: from every branch the ODE goes on to a picture, once on each granularity λ of a
   set Λ: on sigma[k+1], sigma[k+2], sigma[k+2+λ], sigma[k+2+2λ], ...
4. Rewards: every R_n scores every picture.
5. Advantages: z-scored in the group, summed over granularities and rewards, and clamped:
   A_k^m = Σ_λ Σ_n w_n (R_n^{λ,k,m} - mean over m) / (standard deviation over m).
6. Update: with r = p(x_{k+1}^m | x_k) of the weights of now over that of the weights that drew it,
   gradient ascent on the mean over m of min(r A, clip(r, 1-ε, 1+ε) A): k by k, or all k at once.

``generate`` is 1 to 4 (``algorithms/g2rpo.py``), ``learn`` is 5 and 6 (``learner/``).
"""

from contextlib import closing

from g2rpo_ray.common.stop import StopRequested
from g2rpo_ray.config import Config
from g2rpo_ray.training.one_step_off import OneStepOffTrainer
from g2rpo_ray.training.roles import launch
from g2rpo_ray.training.session import open_session
from g2rpo_ray.training.trainer import Trainer


def train(config: Config, resume: str = "none") -> None:
    """Run ``config`` to its end, or to a signal; always leaves a checkpoint and a report.

    Raises:
        StopRequested: a signal ended the run early, after its checkpoint was written.
    """
    pipeline = Trainer if config.pipeline == "sync" else OneStepOffTrainer
    with (
        open_session(config, resume) as session,
        launch(config, session.run.checkpoint, session.note) as roles,
        session.recording(),
        closing(pipeline(session, roles)) as trainer,
    ):
        iterate(trainer)


def iterate(trainer: Trainer) -> None:
    """Iteration by iteration to the last, with what happens around them.

    Whatever ends it, a state that is being written becomes whole first.
    """
    try:
        _iterate(trainer)
    except StopRequested:
        raise
    except BaseException as error:
        trainer.let_write(error)
        raise


def _iterate(trainer: Trainer) -> None:
    evaluation, checkpoint = trainer.config.evaluation, trainer.config.checkpoint
    try:
        trainer.begin()
        # Also the evaluation that a stop cut off.
        if trainer.iteration == 0 or trainer.is_due(evaluation.every):
            trainer.evaluate()
        while not trainer.is_last:
            # Recorded before it is saved: a resumed run never lacks the line of its checkpoint.
            train_iteration(trainer)
            trainer.heldout.collect()
            if trainer.is_due(evaluation.every):
                trainer.evaluate()
            if trainer.is_due(checkpoint.every) or trainer.is_last:
                trainer.save()
            elif trainer.is_due(checkpoint.snapshot_every):
                trainer.snapshot()
        trainer.finish()
    except StopRequested as request:
        trainer.save_stopped(request)
        raise


def train_iteration(trainer: Trainer) -> None:
    """The algorithm: rollout groups, integrated advantages, clipped updates, new weights."""
    drawn = trainer.generate()
    with trainer.stop.held():
        drawn, update = trainer.learn(drawn)
        report = trainer.sync()
        trainer.record(drawn, update, report)
