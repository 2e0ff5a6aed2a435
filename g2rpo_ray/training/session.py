"""One life of a run around its roles: what it tells and records, and what may stop it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from g2rpo_ray.common.files import check_room
from g2rpo_ray.common.logs import log_as, log_file
from g2rpo_ray.common.paths import is_shipped, resolve_path
from g2rpo_ray.common.stop import StopSignal
from g2rpo_ray.config import Config
from g2rpo_ray.models.attention import check_attention
from g2rpo_ray.models.catalogue import absent_files, check_rewards
from g2rpo_ray.models.loading import check_model, part_weights
from g2rpo_ray.plan.memory import state_bytes
from g2rpo_ray.plan.networks import policy_size
from g2rpo_ray.prompts.dataset import (
    check_apart,
    embeddings_of,
    evenly,
    read_config_prompts,
    repeated_words,
)
from g2rpo_ray.prompts.embeddings import embedding_bytes
from g2rpo_ray.prompts.kept import KEPT
from g2rpo_ray.rewards.prompts import check_prompts
from g2rpo_ray.run.folder import Run, begin_life, changed_settings, open_run
from g2rpo_ray.run.paths import run_folder
from g2rpo_ray.tracking.memory import PeakMemory
from g2rpo_ray.tracking.metrics import MetricsLog, read_metrics
from g2rpo_ray.tracking.progress import Progress


class Session:
    """What every part of the training has in common; the roles know nothing of it."""

    def __init__(self, config: Config, run: Run, train: list[str], heldout: list[str]) -> None:
        """Of all prompts to train on, and all held-out ones."""
        self.config, self.run, self.train_prompts = config, run, train
        self.heldout_prompts = evenly(list(enumerate(heldout)), config.evaluation.prompts)
        """(id, text) of those that are used."""
        self.progress = Progress(config.iterations, run.info.iteration)
        self.stop = StopSignal("nothing is lost; the roles that have started are ended first")
        self.memory = PeakMemory()
        settings = config.model_dump(mode="json")
        self.log = MetricsLog(run.folder, config.tracking, settings, run.first_record)
        self.seconds: dict[str, float] = {}
        """Time that each phase took, since the last line of the metrics."""
        self._starting = True

    def note(self, text: str) -> None:
        """Tell what happened; while the roles are starting, this is a place to stop."""
        if self._starting:
            # Nothing is lost yet: a signal need not wait until all roles have started.
            self.stop.check()
        self.progress.note(text)

    def on_wait(self, done: int, total: int) -> None:
        """Called while prompts are drawn: stopping here loses only what is under way."""
        self.progress.waiting(done, total, "prompts")
        self.log.live({"rollout/prompts_left": total - done})
        self.stop.check()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show what the run does, and add up the time it takes."""
        self.progress.phase(name)
        started_s = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started_s

    @contextmanager
    def recording(self) -> Iterator[None]:
        """From the moment when all roles have started: this life's numbers go on from here."""
        with self.log, self.progress:
            self._starting = False
            self.stop.meanwhile = "a checkpoint is written first"
            begin_life(self.run, self.config)
            yield


def _unrecorded(run: Run) -> int:
    """How many iterations behind its state a run's own record does not have."""
    recorded = {record["iteration"] for record in read_metrics(run.folder, "train")}
    return len(set(range(1, run.info.iteration + 1)) - recorded)


def _embeddings_to_keep(config: Config, heldout: int) -> int:
    """Held-out prompts whose embeddings the run's folder lacks."""
    if embeddings_of(config, config.prompts.heldout):
        return 0
    made = len(list((run_folder(config) / KEPT).glob("*.safetensors")))
    return max(0, min(heldout, config.evaluation.prompts) - made)


def _trained_parameters(config: Config) -> int:
    """Number of them; of all weights of this package's model by their files, for which the driver
    needs no library of networks."""
    model = config.model
    some = model.lora or model.trained_modules or model.random_weights
    if some or not is_shipped(resolve_path(model.path)):
        return policy_size(config).trained_parameters
    return sum(prod(place.shape) for place in part_weights(model, "transformer").values())


@contextmanager
def open_session(config: Config, resume: str) -> Iterator[Session]:
    """Check what can be checked without a cluster, and open the run's folder; see ``open_run``."""
    check_model(config)
    check_attention(config)
    check_rewards(config)
    train = read_config_prompts(config, config.prompts.train)
    heldout = read_config_prompts(config, config.prompts.heldout)
    check_apart(train, heldout)
    stop = config.advantage.on_invalid == "stop"
    check_prompts(config.trained_rewards, train, "prompts.train", stop)
    check_prompts(config.rewards, heldout, "prompts.heldout", stop)
    to_keep = _embeddings_to_keep(config, len(heldout))
    size = _trained_parameters(config) * state_bytes(config)
    if not is_shipped(resolve_path(config.model.path)):
        size += to_keep * embedding_bytes(config)
    beside = f" with embeddings of {to_keep} held-out prompts" if to_keep else ""
    check_room(run_folder(config), size, f"a checkpoint{beside}")
    changes = changed_settings(run_folder(config), config) if resume != "none" else []
    session = Session(config, open_run(config, resume), train, heldout)
    if resume == "auto":
        session.progress.note(f"--resume auto {session.run.where_it_starts()}")
        if missing := _unrecorded(session.run):
            session.progress.note(
                f"metrics.jsonl lacks {missing} of the {session.run.info.iteration} iterations "
                "before: evaluation.guards and patience, checkpoint.best and the report go by "
                "what is there"
            )
    for absent in absent_files(config):
        session.progress.note(f"warning: {absent}; it must be where that reward's replicas run")
    if repeated := repeated_words(config, len(train)):
        session.progress.note(f"warning: {repeated}")
    for change in changes:
        session.progress.note(f"changed since the run was started: {change}")
    log_as("driver")
    with session.stop, log_file(session.run.folder / "log.jsonl"), session.memory:
        yield session
