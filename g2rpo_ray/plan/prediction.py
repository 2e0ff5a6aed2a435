"""Seconds of an iteration by phase, for every split of the cards, and the split to take.

The driver is synchronous: it generates, then learns, then syncs; the phases add up. Rewards are
counted with ``min_replicas``: Ray Serve adds more only where cards have room.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from g2rpo_ray.algorithms import make_algorithm
from g2rpo_ray.algorithms.g2rpo import G2rpo
from g2rpo_ray.algorithms.member_walks import MemberWalks
from g2rpo_ray.common.section import LARGEST_SHARED
from g2rpo_ray.config import Config
from g2rpo_ray.maths.granularity import RolloutCounts
from g2rpo_ray.plan.arithmetic import updates_per_iteration
from g2rpo_ray.plan.costs import (
    CPU,
    CardCosts,
    CostsError,
    CostTable,
    PassCost,
    PassName,
    Rate,
    RateName,
)
from g2rpo_ray.plan.memory import (
    BYTES,
    LEARNER_FORWARDS,
    PartsGib,
    card_memory,
    frozen_memory,
    learner_host_memory,
    learner_memory,
    learner_pass_name,
    rollout_memory,
    scorer_memory,
    scorer_pass_name,
)
from g2rpo_ray.plan.networks import PolicySize, ScorerSize, planned_family, policy_size, scorer_size
from g2rpo_ray.plan.packing import pack
from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.section import RewardSection

OPEN_CLIP_KINDS = ("hps", "clip")
COMPILED_LEARNER: PassName = "learner_lora_checkpointing_compiled"
FROZEN = "frozen weights"
"""Their holder, once on every card that a role which maps them is on."""
Name = TypeVar("Name", PassName, RateName)


@dataclass(frozen=True)
class PromptWork:
    """What one prompt asks of the networks."""

    counts: RolloutCounts
    evaluation_passes: int
    """Batches that the evaluations come in."""
    requests: int
    """Requests to each reward."""
    learner_batches: int
    """Forward and backward passes, each over up to ``learner_rows`` latents."""
    learner_rows: int


@dataclass(frozen=True)
class Split:
    """A way to share out the cards, with the seconds of an iteration."""

    workers: int
    ranks: int
    generate_s: float
    learn_s: float
    sync_s: float
    missing_gib: dict[str, float]
    """Role on the fullest card -> how much is missing there; empty where all fits."""

    @property
    def iteration_s(self) -> float:
        return self.generate_s + self.learn_s + self.sync_s

    @property
    def overrides(self) -> str:
        return f"rollout.workers={self.workers} learner.ranks={self.ranks}"


@dataclass(frozen=True)
class Reward:
    """A reward with what is known of its model."""

    settings: RewardSection
    size: ScorerSize | None
    """None for a scorer that is not an open_clip model, or whose model is not there yet."""
    costs: CardCosts


class Predictor:
    """Predicts one configuration on one kind of card."""

    def __init__(self, config: Config, table: CostTable, card: str) -> None:
        """Raises CostsError where the card, or a pass that is needed, was not measured."""
        self.config, self.card, self._algorithm = config, card, make_algorithm(config)
        family, _ = planned_family(config.model.path)
        self.costs = table.of(card).of_family(family.pipeline)
        self.size: PolicySize = policy_size(config)
        self.notes = [f"policy: {self.size.source}", *self._caveats()]
        self.rewards = {name: self._reward(name, table) for name in sorted(config.rewards)}

    @cached_property
    def work(self) -> PromptWork:
        """Of a prompt of the first iteration."""
        algorithm = self._algorithm
        counts = algorithm.counts(0)
        batch, members = self.config.rollout.planned_batch_size, self.config.sampling.members
        # Of several SDE steps in one pass, each has one batch.
        together = min(self.config.learner.steps_per_pass, counts.groups)
        updates = self.config.learner.updates_per_iteration
        steps = updates * math.ceil(counts.groups / together)
        if not isinstance(algorithm, G2rpo):
            # All members walk in step; before the first stochastic step they may be one latent.
            alike = 0
            if isinstance(algorithm, MemberWalks) and algorithm.shared_initial_noise:
                alike = list(algorithm.indices(0)).index(algorithm.sde_steps(0)[0])
            passes = alike + math.ceil(members / batch) * ((counts.evaluations - alike) // members)
            batches = steps * math.ceil(members // updates / batch)
            return PromptWork(counts, passes, 1, batches, algorithm.learner_rows())
        # The anchor alone, then one queue of completions in full batches.
        anchor = self.config.sampling.steps
        passes = anchor + math.ceil((counts.evaluations - anchor) / batch)
        return PromptWork(counts, passes, counts.groups, steps, algorithm.learner_rows())

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration."""
        return updates_per_iteration(self.config, self.work.counts)

    def splits(self, cards: int) -> list[Split]:
        """Every number of ranks that leaves room for a worker, each with workers on as many cards
        as can be, and no more workers than that takes."""
        found = []
        counts = range(1, _most(self.config.rollout.gpus_per_worker, cards) + 1)
        share = self.config.learner.gpus_per_rank
        # NCCL takes no two on one card: the configuration allows one rank of half a card or less.
        most_ranks = 1 if share <= LARGEST_SHARED else min(cards, _most(share, cards))
        for ranks in range(1, most_ranks + 1):
            taken = partial(self.cards_taken, ranks=ranks)
            drawing = partial(self._drawing_cards, ranks=ranks)
            # Both grow with the workers.
            first, end = (find(counts, cards, key=taken) for find in (bisect_left, bisect_right))
            if whole := counts[first:end]:
                workers = whole[bisect_left(whole, drawing(whole[-1]), key=drawing)]
                found.append(self.split(workers, ranks))
        return found

    def split(self, workers: int, ranks: int) -> Split:
        """Time and memory of one split."""
        drawing_cards = self._drawing_cards(workers, ranks)
        seconds = self.generate_s(drawing_cards), self.learn_s(ranks), self.sync_s()
        return Split(workers, ranks, *seconds, self._missing(workers, ranks))

    def cards_taken(self, workers: int, ranks: int) -> int:
        """By all roles; 0 for a run on CPUs."""
        return len(self._placed(workers, ranks))

    def generate_s(self, drawing_cards: int) -> float:
        """Drawing, decoding and scoring; scoring runs beside the rest, but for the last request.
        The workers on a card share what it computes; on a CPU each counts as a card."""
        config, work, costs = self.config, self.work, self.costs
        counts = work.counts
        evaluating_s = self._evaluating_s()
        decode = costs.pass_cost(self._as_rollout("decode", "decode_compiled"))
        in_request = counts.pictures / work.requests
        decode_passes = work.requests * math.ceil(in_request / config.rollout.decode_batch_size)
        decoding_s = decode.time_s(decode_passes, counts.pictures * self.size.decode.tflop)
        drawing_s = evaluating_s + decoding_s
        prompts = config.sampling.prompts_per_iteration
        rounds = math.ceil(prompts / drawing_cards)
        requests = {
            name: (reward.settings, self._request_s(reward, in_request))
            for name, reward in self.rewards.items()
            if reward.settings.weight > 0
        }
        if costs.memory_gib is None:
            # One pool of cores: what the scorers compute, the workers wait for.
            scoring_s = work.requests * sum(seconds for _, seconds in requests.values())
            return rounds * (drawing_s + scoring_s)
        busiest_s = max(
            prompts * work.requests * seconds / settings.min_replicas
            for settings, seconds in requests.values()
        )
        last_s = max(seconds for _, seconds in requests.values())
        return max(rounds * drawing_s, busiest_s) + last_s

    def _evaluating_s(self) -> float:
        """All evaluations of a prompt."""
        work, tflop = self.work, self.size.evaluation.tflop
        exact = self._as_rollout("evaluation", "evaluation_compiled")
        algorithm = self._algorithm
        float8 = algorithm.float8_evaluations() if isinstance(algorithm, G2rpo) else 0
        batches = math.ceil(float8 / self.config.rollout.planned_batch_size)
        seconds = self.costs.pass_cost(exact).time_s(
            work.evaluation_passes - batches, (work.counts.evaluations - float8) * tflop
        )
        if float8:
            rounded = self._as_rollout(exact, "evaluation_float8")
            seconds += self.costs.pass_cost(rounded).time_s(batches, float8 * tflop)
        return seconds + self._widening_s(work.evaluation_passes - batches)

    def _widening_s(self, forwards: float) -> float:
        """Of ``model.frozen_dtype``: every forward pass widens all rounded weights, and so does
        every backward pass through them."""
        if self.config.model.frozen_dtype is None or "widening" not in self.costs.rates:
            return 0.0
        return forwards * self.costs.rate("widening").time_s(self.size.rounded_parameters)

    def learn_s(self, ranks: int) -> float:
        """Passes, communication of ZeRO and optimizer steps of the busiest rank."""
        config, work, costs = self.config, self.work, self.costs
        prompts = math.ceil(config.sampling.prompts_per_iteration / ranks)
        passes, latents = prompts * work.learner_batches, prompts * work.counts.learner_passes
        cost, forwards = self._learner_cost()
        forward_tflop = latents * self.size.learner_tflop
        seconds = cost.time_s(passes, forwards * forward_tflop)
        extra_forwards = (config.learner.kl_weight > 0) + (config.learner.old_log_prob == "learner")
        evaluation = costs.pass_cost("evaluation")
        seconds += extra_forwards * evaluation.time_s(passes, forward_tflop)
        seconds += self._widening_s(passes * (forwards + extra_forwards))
        shard = self.size.trained_parameters / ranks
        on_host = config.learner.offload_optimizer
        optimizer = self._rate("optimizer_host" if on_host else "optimizer", "optimizer")
        seconds += self.updates * optimizer.time_s(shard)
        if self._compiled_learner:
            tensors = costs.rate("optimizer_tensors").time_s(self.size.trained_tensors)
            seconds += self.updates * tensors
        if on_host and "gradients_to_host" in costs.rates:
            gradients = passes * shard * BYTES[config.model.dtype]
            seconds += costs.rate("gradients_to_host").time_s(gradients)
        if ranks > 1 and "link" in costs.rates:
            share = (ranks - 1) / ranks
            seconds += costs.rate("link").time_s(share * self._learner_traffic(passes))
        return seconds

    def sync_s(self) -> float:
        """Weights out of the learner and into all workers at once, by the run's transport."""
        size = self.size.trained_parameters * BYTES[self.config.model.dtype]
        by_nccl = self.config.weight_transport == "nccl"
        rate = self._rate("sync_nccl" if by_nccl else "sync_object_store", "sync_object_store")
        return rate.time_s(size)

    def memory(self, ranks: int) -> dict[str, PartsGib]:
        """By role; a reward that is not known is left out."""
        roles = {
            "rollout worker": rollout_memory(self.config, self.size, self.costs),
            "learner rank": learner_memory(
                self.config, self.size, self.costs, ranks, self.work.learner_rows
            ),
        }
        if self.config.shares_frozen:
            roles[FROZEN] = frozen_memory(self.config, self.size, self.costs)
        for name, reward in self.rewards.items():
            if reward.size is not None:
                roles[f"reward {name}"] = scorer_memory(reward.settings, reward.size, reward.costs)
        return roles

    def host_memory(self, ranks: int) -> PartsGib:
        """Of a learner rank, beside its process; empty for a run on CPUs."""
        if self.costs.memory_gib is None:
            return {}
        return learner_host_memory(self.config, self.size, ranks)

    def _reward(self, name: str, table: CostTable) -> Reward:
        settings = self.config.rewards[name]
        costs = self.costs if settings.gpus_per_replica > 0 else table.of(CPU)
        if settings.kind not in OPEN_CLIP_KINDS:
            if settings.weight > 0:
                self.notes.append(
                    f"reward {name}: costs of kind {settings.kind!r} are not known, counted as 0"
                )
            return Reward(settings, None, costs)
        architecture = settings.options.get("architecture", "ViT-H-14")
        try:
            return Reward(settings, scorer_size(architecture), costs)
        except ScorerError:
            self.notes.append(f"reward {name}: {architecture} is not there yet, taken as ViT-H-14")
            return Reward(settings, scorer_size("ViT-H-14"), costs)

    def _request_s(self, reward: Reward, pictures: float) -> float:
        if reward.size is None:
            return 0.0
        passes = math.ceil(pictures / reward.settings.batch_size)
        cost = reward.costs.pass_cost(scorer_pass_name(reward.settings.kind))
        return cost.time_s(passes, pictures * reward.size.image.tflop)

    def _caveats(self) -> list[str]:
        """What the settings ask for and the times leave out or take from elsewhere."""
        model, learner, measured = self.config.model, self.config.learner, self.costs.reference
        attention = self.config.rollout.attention
        notes = {
            f"times on {self.card} are estimates, of H100's by data sheets; memory is counted as "
            "on any card": self.costs.is_estimate,
            f"costs of {self.card} were measured in {measured.dtype}, the run computes in "
            f"{model.dtype}: times are not comparable": model.dtype != measured.dtype,
            "learner.offload_optimizer: gradients on their way to the host take time that is not "
            "counted": learner.offload_optimizer and "gradients_to_host" not in self.costs.rates,
            "learner.offload_parameters: weights on their way to the card take time that is not "
            "counted": learner.offload_parameters,
            "model.frozen_dtype: widening the weights for every product takes time that is not "
            "counted": model.frozen_dtype is not None and "widening" not in self.costs.rates,
            f"rollout.attention={attention}: evaluations are counted as with cudnn": (
                attention not in (None, "cudnn")
            ),
            "model.trained_modules: a learner pass is counted as one of all weights": (
                model.trained_modules is not None
            ),
        }
        return [note for note, holds in notes.items() if holds]

    def _as_rollout(self, plain: PassName, compiled: PassName) -> PassName:
        """The pass as the rollout runs it: compiled on a card, if it is not told otherwise."""
        wanted = self.config.rollout.compile
        if wanted is None:
            wanted = self.costs.memory_gib is not None
        return self._measured(self.costs.passes, compiled, plain) if wanted else plain

    def _rate(self, wanted: RateName, instead: RateName) -> Rate:
        return self.costs.rate(self._measured(self.costs.rates, wanted, instead))

    def _measured(self, table: Mapping[Name, object], wanted: Name, instead: Name) -> Name:
        """One of two entries: the other, with a note, where the wanted one was not measured."""
        if table.get(wanted) or wanted == instead:
            return wanted
        text = f"no {wanted} was measured on {self.card}, taken as {instead}"
        if text not in self.notes:
            self.notes.append(text)
        return instead

    @property
    def _compiled_learner(self) -> bool:
        """Whether passes are of the compiled kind that was measured, of some families."""
        model = self.config.model
        asked = self.config.learner.compile and bool(model.lora) and model.gradient_checkpointing
        return asked and COMPILED_LEARNER in self.costs.passes

    def _learner_cost(self) -> tuple[PassCost, int]:
        """Of the run's kind of pass, or of another kind that was measured: operations compare."""
        name = learner_pass_name(
            self.config.model.lora is not None, self.config.model.gradient_checkpointing
        )
        known = [name, *LEARNER_FORWARDS]
        measured = next((n for n in known if self.costs.passes.get(n)), None)
        if self._compiled_learner:
            measured = COMPILED_LEARNER
        if measured is None:
            raise CostsError(f"the table of costs has no pass of a learner for {self.card}")
        return self.costs.pass_cost(measured), LEARNER_FORWARDS[name]

    def _learner_traffic(self, passes: int) -> float:
        """Bytes that a rank exchanges in an iteration, overlapping with nothing."""
        size, width = self.size, BYTES[self.config.model.dtype]
        gradients = size.trained_parameters * width
        if self.config.learner.zero_stage == 1:
            # Reduced and gathered once an update.
            return self.updates * 2 * gradients
        if self.config.learner.zero_stage == 2:
            # Every pass reduces its gradients; an update gathers the new weights.
            return passes * gradients + self.updates * gradients
        weights = size.held_parameters * width
        # Weights are gathered for the forward and for the backward pass.
        return passes * (2 * weights + gradients)

    def _placed(self, workers: int, ranks: int) -> list[list[str]]:
        """Roles on every card."""
        config = self.config
        # Those that evaluate while the run trains hold what a rollout worker does.
        drawing = workers + config.evaluation.workers
        shares = [("rollout worker", config.rollout.gpus_per_worker)] * drawing
        shares += [("learner rank", config.learner.gpus_per_rank)] * ranks
        for name, reward in config.rewards.items():
            shares += [(f"reward {name}", reward.gpus_per_replica)] * reward.min_replicas
        cards = pack(shares)
        for roles in cards if config.shares_frozen else ():
            if {"rollout worker", "learner rank"} & {*roles}:
                roles.append(FROZEN)
        return cards

    def fullest_card(self, workers: int, ranks: int) -> tuple[str, float]:
        """Its roles, and the GiB that it needs for them; for a run on CPUs nothing."""
        return max(self._needs(workers, ranks).items(), key=lambda it: it[1], default=("", 0.0))

    def _needs(self, workers: int, ranks: int) -> dict[str, float]:
        """Roles on a card -> GiB."""
        memory, needs = self.memory(ranks), dict[str, float]()
        # Those that evaluate while the run trains wait for nobody.
        in_step = self.config.pipeline == "sync" and not self.config.evaluation.workers
        for roles in self._placed(workers, ranks):
            known = [memory[role] for role in roles if role in memory]
            by_turns = in_step and len({*roles} - {FROZEN}) > 1
            needs[" + ".join(roles)] = card_memory(known, by_turns)
        return needs

    def _missing(self, workers: int, ranks: int) -> dict[str, float]:
        capacity = self.costs.memory_gib
        if capacity is None:
            return {}
        needs = self._needs(workers, ranks)
        return {roles: gib - capacity for roles, gib in needs.items() if gib > capacity}

    def _drawing_cards(self, workers: int, ranks: int) -> int:
        placed = self._placed(workers, ranks)
        # Where others evaluate while the run trains, cards of theirs draw nothing for it.
        return min(workers, sum("rollout worker" in roles for roles in placed) or workers)


def _most(share: float, cards: int) -> int:
    """Processes of that share of a card on so many cards."""
    return int(cards / share + 1e-9)


def recommend(splits: list[Split]) -> Split | None:
    """The fastest split that fits; of equal ones the one with fewer ranks."""
    fitting = [split for split in splits if not split.missing_gib]
    return min(fitting, key=lambda s: (s.iteration_s, s.ranks), default=None)
