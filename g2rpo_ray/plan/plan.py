"""``g2rpo plan``: everything known before a run, as text and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.models.catalogue import absent_files, check_rewards
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.plan.arithmetic import describe
from g2rpo_ray.plan.costs import CPU, CostTable, load_costs
from g2rpo_ray.plan.encoding import Encoding, plan_encoding
from g2rpo_ray.plan.memory import PartsGib
from g2rpo_ray.plan.prediction import Predictor, Split, recommend
from g2rpo_ray.prompts.dataset import check_apart, read_config_prompts, repeated_words
from g2rpo_ray.prompts.formats import PromptFileError

DEFAULT_CARD = "H100"
MOST_ROWS = 16
"""Rows of the printed table; the fastest are shown."""


@dataclass(frozen=True)
class Plan:
    """What a configuration costs on a number of cards."""

    predictor: Predictor
    cards: int
    """0 for a run on CPU cores."""
    splits: list[Split]
    configured: Split
    recommended: Split | None
    """None where nothing fits."""
    encoding: Encoding | None
    """None where it is not known."""

    @property
    def shown(self) -> Split:
        """The split whose memory is shown: the recommended one, or else the configured one."""
        return self.recommended or self.configured


def make_plan(config: Config, table: CostTable, gpus: int | None, card: str | None) -> Plan:
    """Predict ``config`` on ``gpus`` cards (none: as many as it asks for) of one kind.

    Raises:
        InputError: the cards cannot hold the roles, or were not measured.
    """
    if gpus is not None and gpus < 1:
        raise InputError(f"--gpus {gpus}: at least 1 is needed")
    if not (config.rollout.gpus_per_worker and config.learner.gpus_per_rank):
        if gpus is not None or (card or CPU) != CPU:
            raise InputError(
                "this configuration runs on CPUs (rollout.gpus_per_worker and "
                "learner.gpus_per_rank are 0): --gpus and --card do not apply"
            )
        predictor = Predictor(config, table, CPU)
        split = predictor.split(config.rollout.workers, config.learner.ranks)
        return Plan(predictor, 0, [split], split, split, _encoding(predictor, table, split))
    predictor = Predictor(config, table, card or DEFAULT_CARD)
    cards = gpus or predictor.cards_taken(config.rollout.workers, config.learner.ranks)
    splits = predictor.splits(cards)
    if not splits:
        raise InputError(
            f"{cards} GPU(s) do not hold a rollout worker, a learner rank and the reward servers "
            f"({config.rollout.gpus_per_worker:g}, {config.learner.gpus_per_rank:g} and "
            f"{sum(r.gpus_per_replica * r.min_replicas for r in config.rewards.values()):g} "
            "GPUs): give more, or smaller shares (rollout.gpus_per_worker=0.5)"
        )
    configured = predictor.split(config.rollout.workers, config.learner.ranks)
    recommended = recommend(splits)
    prompts = config.sampling.prompts_per_iteration
    if recommended and max(recommended.workers, recommended.ranks) > prompts:
        predictor.notes.append(
            f"{prompts} prompts an iteration keep at most {prompts} workers and {prompts} ranks "
            f"busy: {cards} GPUs want more (sampling.prompts_per_iteration)"
        )
    encoding = _encoding(predictor, table, configured)
    return Plan(predictor, cards, splits, configured, recommended, encoding)


def _encoding(predictor: Predictor, table: CostTable, split: Split) -> Encoding | None:
    encoding = plan_encoding(predictor.config, table, predictor.card)
    if encoding and (warning := encoding.warning(split.iteration_s)):
        predictor.notes.append(warning)
    return encoding


def prompt_lines(config: Config) -> list[str]:
    """For a dry run: how many prompts each file has that is there.

    Raises:
        PromptFileError: of a file with which the run, too, would end.
    """
    lines, found = [], []
    for name in ("train", "heldout"):
        path = getattr(config.prompts, name)
        there = resolve_path(path).exists()
        found.append(read_config_prompts(config, path) if there else [])
        told = f"{path}, {len(found[-1])} prompts" if there else f"{path} is not there (yet)"
        lines.append(_line(f"prompts.{name}", told))
    check_apart(*found)
    repeated = found[0] and repeated_words(config, len(found[0]))
    return lines + ([_line("warning", repeated)] if repeated else [])


def reward_lines(config: Config) -> list[str]:
    """For a dry run: files of rewards that are not there.

    Raises:
        ScorerError: of those that are, with which the run, too, would end.
    """
    check_rewards(config)
    return [_line("reward", f"{absent} (yet)") for absent in absent_files(config)]


def encoding_lines(config: Config) -> list[str]:
    """For a dry run: what encoding takes, with a warning where that is longer than an iteration.

    Raises:
        ModelFolderError, PromptFileError: of files with which the run, too, would end.
    """
    try:
        plan = make_plan(config, load_costs(), None, None)
    except (ModelFolderError, PromptFileError):
        raise
    except InputError as error:
        return [_line("encoding", f"not predicted: {error}")]
    warning = plan.encoding and plan.encoding.warning(plan.configured.iteration_s)
    lines = [_line("encoding", _encoding_text(plan))]
    return lines + ([_line("warning", warning)] if warning else [])


def _encoding_text(plan: Plan) -> str:
    return str(plan.encoding or "not known: the text encoders' weights are not there yet")


def _line(name: str, text: str) -> str:
    return f"{name:>15}  {text}"


def as_text(plan: Plan) -> str:
    """The plan for people."""
    predictor, config = plan.predictor, plan.predictor.config
    size, costs = predictor.size, predictor.costs
    calls = _scorer_calls(predictor)
    lines = [
        describe(config),
        f"{'scorer calls':>15}  {sum(calls.values())} of "
        f"{predictor.work.counts.pictures // predictor.work.requests} pictures "
        f"({', '.join(f'{name} {count}' for name, count in calls.items())})",
        f"{'policy':>15}  {size.parameters:,} parameters, "
        f"{size.trained_parameters:,} trained, "
        f"{size.evaluation.tflop:.3g} TFLOP an evaluation of {size.passes} pass(es) "
        f"({size.evaluation.attention / 1e12:.3g} of them attention), "
        f"{size.decode.tflop:.3g} a decode",
        f"{'costs':>15}  {costs.card}, {'ESTIMATED from what was ' if costs.is_estimate else ''}"
        f"measured {costs.date} with torch {costs.versions['torch']}",
        _line("encoding", _encoding_text(plan)),
        *(_line("note", note) for note in predictor.notes),
        "",
        *_memory_lines(plan),
        "",
        *_split_lines(plan),
    ]
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs; seconds, GiB and counts of one iteration."""
    predictor = plan.predictor
    prompts, work = predictor.config.sampling.prompts_per_iteration, predictor.work
    return {
        "card": predictor.card,
        "gpus": plan.cards,
        "notes": predictor.notes,
        "counts": {
            "evaluations": prompts * work.counts.evaluations,
            "decodes": prompts * work.counts.pictures,
            "scorer_calls": _scorer_calls(predictor),
            "learner_passes": prompts * work.counts.learner_passes,
            "optimizer_steps": predictor.updates,
        },
        "policy": asdict(predictor.size),
        "encoding": asdict(plan.encoding) if plan.encoding else None,
        "memory_gib": predictor.memory(plan.shown.ranks),
        "host_memory_of_a_rank_gib": predictor.host_memory(plan.shown.ranks),
        "splits": [_split_json(split) for split in plan.splits],
        "fullest_card_gib": predictor.fullest_card(plan.shown.workers, plan.shown.ranks)[1],
        "configured": _split_json(plan.configured),
        "recommended": _split_json(plan.recommended) if plan.recommended else None,
    }


def _scorer_calls(predictor: Predictor) -> dict[str, int]:
    prompts = predictor.config.sampling.prompts_per_iteration
    return {name: prompts * predictor.work.requests for name in predictor.config.trained_rewards}


def _memory_lines(plan: Plan) -> list[str]:
    predictor, ranks = plan.predictor, plan.shown.ranks
    costs = predictor.costs
    capacity = f"of {costs.memory_gib:g} on a card" if costs.memory_gib else "without its libraries"
    lines = [f"Memory of a process in GiB with {ranks} learner rank(s), {capacity}:"]
    lines += [f"{role:>15}  {_sum_of(gib)}" for role, gib in predictor.memory(ranks).items()]
    roles, gib = predictor.fullest_card(plan.shown.workers, ranks)
    if " + " in roles:
        lines.append(f"The fullest card, {roles}: {gib:.3g}, those that wait having given back")
    if host := predictor.host_memory(ranks):
        lines.append(f"Host memory of a rank beside its process, GiB: {_sum_of(host)}")
    return lines


def _sum_of(parts_gib: PartsGib) -> str:
    parts = " + ".join(f"{name} {gib:.3g}" for name, gib in parts_gib.items() if gib)
    return f"{sum(parts_gib.values()):.3g} = {parts}"


def _split_lines(plan: Plan) -> list[str]:
    where = f"{plan.cards} x {plan.predictor.card}" if plan.cards else "CPU cores, one a worker"
    fastest = sorted(plan.splits, key=lambda s: (bool(s.missing_gib), s.iteration_s))
    shown = sorted(fastest[:MOST_ROWS], key=lambda s: s.ranks)
    lines = [
        f"Seconds of an iteration on {where}:",
        f"{'workers':>9}{'ranks':>7}{'generate':>10}{'learn':>9}{'sync':>8}{'iteration':>11}",
    ]
    lines += [_split_line(plan, split) for split in shown]
    if len(shown) < len(plan.splits):
        lines.append(f"  ({len(plan.splits) - len(shown)} more splits are not shown)")
    if plan.recommended is None:
        lines.append("No split fits: see what is missing, and try learner.zero_stage=3,")
        lines.append("model.gradient_checkpointing=true, learner.offload_optimizer=true,")
        lines.append("model.trained_modules, model.lora with model.share_frozen=auto and")
        lines.append("model.frozen_dtype=float8, a smaller rollout.batch_size or more GPUs.")
    else:
        lines.append(f"recommended: {plan.recommended.overrides}")
    return lines


def _split_line(plan: Plan, split: Split) -> str:
    remarks = []
    if split.missing_gib:
        role, gib = max(split.missing_gib.items(), key=lambda item: item[1])
        remarks.append(f"does not fit: {role} lacks {gib:.1f} GiB")
    if (split.workers, split.ranks) == (plan.configured.workers, plan.configured.ranks):
        remarks.append("configured")
    if split is plan.recommended:
        remarks.append("recommended")
    seconds = (split.generate_s, split.learn_s, split.sync_s, split.iteration_s)
    digits = 1 if split.iteration_s >= 100 else 2
    columns = "".join(
        f"{value:>{width}.{digits}f}" for value, width in zip(seconds, (10, 9, 8, 11), strict=True)
    )
    remark = f"  {', '.join(remarks)}" if remarks else ""
    return f"{split.workers:>9}{split.ranks:>7}{columns}{remark}"


def _split_json(split: Split) -> dict[str, Any]:
    return asdict(split) | {"iteration_s": split.iteration_s, "overrides": split.overrides}
