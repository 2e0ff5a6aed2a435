"""The one table of metric names: what each number is, and its unit.

``python -m g2rpo_ray.tracking.names docs/metrics.md`` writes the table into the documentation.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from g2rpo_ray.common.errors import InputError


class TrackingError(InputError):
    """A record of the run cannot be kept; the message says where, what, and what is allowed."""


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    unit: str
    """Unit of the number; ``1`` for a plain ratio or score."""
    meaning: str
    """What the number says."""
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    """What Ray's metrics endpoint makes of it: the last number, the sum over all iterations, or
    the distribution of many."""


@dataclass(frozen=True)
class KnownName:
    """A metric's name, taken apart."""

    pattern: str
    """The row of the table, such as ``reward/<name>/mean``."""
    reward: str | None
    """The reward that stands for ``<name>``; none where the row has no such part."""

    @property
    def metric(self) -> Metric:
        """The row itself."""
        return ALL[self.pattern]

    @property
    def exported(self) -> str:
        """Name for systems that allow neither dots nor slashes: ``g2rpo_reward_mean``.

        A counter ends in ``_total``. Ray puts ``ray_`` before all of them.
        """
        name = "g2rpo_" + self.pattern.replace("/<name>", "").replace("/", "_")
        return f"{name}_total" if self.metric.kind == "counter" else name


METRICS: dict[str, Metric] = {
    "weight_version": Metric("count", "Version of the weights that drew the iteration's pictures."),
    "reward/<name>/mean": Metric(
        "1", "Mean over the iteration's pictures that have a finite score; no number where none "
        "has one.",
    ),
    "reward/<name>/spread": Metric(
        "1", "Standard deviation inside a (prompt, step, granularity), mean of those whose members "
        "all have a finite score.",
    ),
    "reward/<name>/constant_share": Metric(
        "share", "Part of the (prompt, step, granularity) whose scores do not differ: they teach "
        "nothing. Of those whose members all have a finite score.",
    ),
    "reward/<name>/latency_s": Metric(
        "s", "Time in which a replica scored one request, mean; waiting for a free replica is in "
        "rollout/score_s. No number where nothing was scored.",
    ),
    "reward/<name>/batch_fill": Metric(
        "share", "Pictures in the scorer's passes, by what rewards.<name>.batch_size allows, mean."
    ),
    "reward/<name>/failures": Metric(
        "count", "Tries that gave no usable score, those that a retry mended included.",
        kind="counter",
    ),
    "advantage/abs_mean": Metric("1", "Mean size of the integrated advantage of a branch."),
    "advantage/clamped_share": Metric("share", "Part of the branches cut at ±advantage.clamp."),
    "groups/trained": Metric(
        "groups", "(prompt, step) groups that the learner trained on.", kind="counter"
    ),
    "groups/dropped": Metric(
        "groups", "(prompt, step) groups left out because a score was missing, NaN or infinite.",
        kind="counter",
    ),
    "groups/masked_members": Metric(
        "members", "Members of trained groups that were left out because their probability ratio "
        "was not finite.",
        kind="counter",
    ),
    "policy/loss": Metric("1", "Clipped objective, averaged over the groups."),
    "policy/ratio_mean": Metric("1", "Mean probability ratio of new to old weights; near 1."),
    "policy/first_max_abs_log_ratio": Metric(
        "nat", "Largest |Δlog p| before the first update: rollout and learner disagree by this "
        "much. 0 in float32 with pipeline: sync; above learner.clip the two sides compute "
        "different things, or the groups are of older weights.",
    ),
    "policy/max_abs_log_ratio": Metric(
        "nat", "Largest |Δlog p| over all groups and updates; no number where one is NaN."
    ),
    "policy/approx_kl": Metric("nat", "Estimate of KL(old || new): mean of ratio - 1 - log ratio."),
    "policy/kl_to_reference": Metric(
        "nat", "KL from the reference (the model without adapters) of a stochastic step, element "
        "mean; 0 where learner.kl_weight is 0: it is not computed then.",
    ),
    "policy/clip_fraction_low": Metric(
        "share", "Part of the branches whose ratio is clipped at 1 - learner.clip."
    ),
    "policy/clip_fraction_high": Metric(
        "share", "Part of the branches whose ratio is clipped at 1 + learner.clip."
    ),
    "policy/grad_norm": Metric("1", "Global gradient norm before it is limited, mean of updates."),
    "policy/learning_rate": Metric("1", "Learning rate of the iteration's last update."),
    "policy/updates": Metric("count", "Optimizer steps of the iteration.", kind="counter"),
    "time/generate_s": Metric("s", "Driver waited for rollout and rewards."),
    "time/learn_s": Metric("s", "Driver waited for the learner."),
    "time/sync_s": Metric("s", "Driver waited for the weights to reach every receiver."),
    "time/evaluate_s": Metric(
        "s", "Driver waited for the evaluation on held-out prompts; the one before training "
        "stands in the first line.",
    ),
    "time/checkpoint_s": Metric(
        "s", "Driver waited for the learner to copy its state for a checkpoint or snapshot, and "
        "for the one before to be whole. That is after the iteration was recorded, so its time "
        "stands in the next line.",
    ),
    "time/iteration_s": Metric("s", "Whole iteration, everything above included."),
    "rollout/denoise_s": Metric("s", "Spent in the transformer, summed over the workers."),
    "rollout/decode_s": Metric("s", "Spent in the VAE, summed over the workers."),
    "rollout/score_s": Metric("s", "Spent waiting for scores, summed over the workers."),
    "rollout/evaluations": Metric(
        "evaluations", "Velocity predictions for one latent, counted at the network.",
        kind="counter",
    ),
    "rollout/pictures": Metric("pictures", "Pictures decoded and scored.", kind="counter"),
    "rollout/evaluations_per_s": Metric("1/s", "rollout/evaluations by time/generate_s."),
    "rollout/tflop_per_s": Metric(
        "TFLOP/s", "Operations of a worker's evaluations by rollout/denoise_s, mean of the "
        "workers; a multiply-add counts as two. By the card's peak it is the utilisation.",
    ),
    "rollout/staleness": Metric(
        "count", "Age of the oldest weights that drew one of the iteration's groups, in versions; "
        "0 with pipeline: sync.",
    ),
    "rollout/workers": Metric("count", "Rollout workers that are ready at the iteration's end."),
    "rollout/replaced": Metric(
        "count", "Rollout workers lost in the iteration.", kind="counter"
    ),
    "rollout/repeated": Metric(
        "count", "Prompts handed out again, since their worker was lost.", kind="counter"
    ),
    "learner/rebuilds": Metric(
        "count", "Times that a lost rank had the learner rebuilt.", kind="counter"
    ),
    "evaluation/missed": Metric(
        "count", "Evaluations beside the training that failed, or were left out because the one "
        "before was still under way; the driver said which and why. They have no numbers.",
        kind="counter",
    ),
    "checkpoint/write_s": Metric(
        "s", "The slowest learner rank wrote, flushed and checked checkpoints or snapshots in the "
        "background; those found whole in the iteration.",
    ),
    "idle/rollout": Metric("share", "Part of the iteration that workers spent without a prompt."),
    "idle/learner": Metric("share", "Part of the iteration that the learner made no update in."),
    "idle/rewards": Metric(
        "share", "Part of the iteration that the reward replicas worked on no request, all rewards "
        "together; by the replicas' own clocks, as of their last answers to training prompts.",
    ),
    "sync/bytes": Metric("B", "Size of the weights that one receiver got."),
    "sync/tensors": Metric("count", "Tensors that every receiver bound, verified by checksum."),
    "memory/pss_gib": Metric(
        "GiB", "Proportional set size of all processes of the run on the driver's machine, last "
        "sample.",
    ),
    "heldout/<name>": Metric(
        "1", "Mean score on the held-out prompts; only where evaluated, and no number where a "
        "picture has no score: means over other prompts do not compare. Iteration 0 is before "
        "training.",
    ),
}  # fmt: skip
"""Recorded once an iteration, in every sink."""

LIVE: dict[str, Metric] = {
    "run/iterations": Metric("count", "Iterations of the whole run."),
    "run/iteration": Metric("count", "Last iteration that was recorded."),
    "run/started_unix_s": Metric("s", "When this life of the run began to train, Unix time."),
    "run/recorded_unix_s": Metric("s", "When the last iteration was recorded, Unix time."),
    "run/checkpoint_unix_s": Metric(
        "s", "When a checkpoint or snapshot of this life was last found whole, Unix time."
    ),
    "run/clip": Metric("1", "The setting learner.clip, to compare ratios with."),
    "run/not_finite": Metric(
        "count", "Recorded numbers that were NaN or infinite. Ray does not export such a number: "
        "its metric keeps the value before.", kind="counter",
    ),
    "rollout/prompts_left": Metric("prompts", "Prompts of the phase that are not drawn yet."),
    "rollout/prompt_s": Metric(
        "s", "Drawing, decoding and scoring one prompt.", kind="histogram"
    ),
}  # fmt: skip
"""Shown by Ray's metrics endpoint alone: they change inside an iteration, or watch over the run."""

ALL = METRICS | LIVE

_REWARD = r"[a-z][a-z0-9_]*"
_PATTERNS = {
    pattern: re.compile(re.escape(pattern).replace("<name>", f"({_REWARD})")) for pattern in ALL
}


def known_name(name: str) -> KnownName:
    """Find the row of a metric's name.

    Raises:
        TrackingError: the table has no such row.
    """
    for pattern, expression in _PATTERNS.items():
        match = expression.fullmatch(name)
        if match:
            return KnownName(pattern, match[1] if match.groups() else None)
    topic = name.partition("/")[0]
    allowed = [pattern for pattern in ALL if pattern.partition("/")[0] == topic] or list(ALL)
    raise TrackingError(
        f"metric {name!r} is not in g2rpo_ray/tracking/names.py; allowed: {', '.join(allowed)}"
    )


def markdown_table() -> str:
    """The table as docs/metrics.md shows it, one section per first part of the name."""
    live = [_HEAD, *(_markdown_row(name) for name in LIVE)]
    return "\n\n".join([*_markdown_sections(), "### On Ray's endpoint only", "\n".join(live)])


def write_documentation(path: Path) -> None:
    """Replace what stands between the two markers of ``path`` by the table."""
    text = path.read_text(encoding="utf-8")
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise TrackingError(f"{path}: the table belongs between {BEGIN} and {END}; one is missing")
    path.write_text(f"{before}{BEGIN}\n\n{markdown_table()}\n\n{END}{after}", encoding="utf-8")


BEGIN = "<!-- table: written by python -m g2rpo_ray.tracking.names docs/metrics.md -->"
END = "<!-- end of table -->"
_HEAD = "| name | unit | on Ray's endpoint | meaning |\n|---|---|---|---|"


def _markdown_sections() -> Iterator[str]:
    for topic, names in groupby(METRICS, key=lambda name: name.partition("/")[0]):
        yield "\n".join([f"### {topic}", "", _HEAD, *(_markdown_row(name) for name in names)])


def _markdown_row(name: str) -> str:
    metric = ALL[name]
    cells = (f"`{name}`", metric.unit, metric.kind, metric.meaning)
    # A bar, as in |Δlog p|, would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    write_documentation(Path(sys.argv[1]))
