"""The table of measured costs (``costs.json``) that predictions are made from.

Every number in it was measured by ``scripts/bench_costs.py`` or says where it comes from.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import cause_of
from g2rpo_ray.common.section import Section

CPU = "cpu-core"
"""Name of the entry of one CPU core."""

MEASURED_SHEET = "H100", 989.0, 3350.0
DATA_SHEETS = {
    "A100-40": ("NVIDIA A100 40GB", 39.4, 312.0, 1555.0),
    "L40S-48": ("NVIDIA L40S", 44.4, 362.0, 864.0),
    "RTX4090-24": ("NVIDIA GeForce RTX 4090", 23.5, 165.0, 1008.0),
    "RTX5090-32": ("NVIDIA GeForce RTX 5090", 31.3, 209.5, 1792.0),
}
"""Cards that were not measured: name, GiB that a process can use, TFLOP/s of dense bfloat16
products added up in float32, GB/s of memory; before them the card that is scaled by the ratio."""

PassName = Literal[
    "evaluation",
    "evaluation_compiled",
    "evaluation_float8",
    "decode",
    "decode_compiled",
    "learner_lora",
    "learner_lora_checkpointing",
    "learner_lora_checkpointing_compiled",
    "learner_full",
    "learner_full_checkpointing",
    "score_hps",
    "score_clip",
]
"""``compiled`` are those of a rollout on a card, unless ``rollout.compile`` is false, and of a
learner with ``learner.compile``; ``float8`` is compiled, too, with ``rollout.fp8``."""

RateName = Literal[
    "matrix",
    "optimizer",
    "optimizer_tensors",
    "optimizer_host",
    "gradients_to_host",
    "widening",
    "sync_object_store",
    "sync_nccl",
    "link",
]
"""matrix: FLOP of a large product; optimizer_tensors: adapters' tensors that a step begins with;
optimizer: parameters through AdamW, on the card, or on the host
with ``learner.offload_optimizer``; gradients_to_host: bytes of gradients that move there in every
pass then; widening: weights in 8 bits widened for products; sync: bytes of weights into the
workers, verified; link: bytes between two cards."""


class CostsError(InputError):
    """The table of costs cannot be used; the message says where, what, and what is allowed."""


class Measurement(Section):
    """One pass of a network over one batch."""

    batch: int = Field(ge=1)
    """Samples in the pass."""
    seconds: float = Field(gt=0)
    """Median time of the pass."""
    tflop: float = Field(gt=0)
    """Operations of the whole pass, counted; of the image tower alone for a scorer."""
    activations_gib: float | None = Field(None, ge=0)
    """Peak device memory during the pass beyond weights and gradients; none on a CPU."""


class Rate(Section):
    """Something that takes time in proportion to its amount."""

    amount: float = Field(gt=0)
    seconds: float = Field(gt=0)
    note: str = ""
    """Where the number comes from, if not from the entry's own command."""

    def time_s(self, amount: float) -> float:
        return self.seconds * amount / self.amount


class Reference(Section):
    """The policy that was measured."""

    tokens: int = Field(ge=1)
    """Image and text tokens."""
    width: int = Field(ge=1)
    """Channels of the hidden states."""
    blocks: int = Field(ge=1)
    pixels: int = Field(ge=1)
    dtype: str
    """What it computed in."""


class PassCost(Section):
    """Seconds of a pass: ``fixed_s`` + batch x TFLOP of a sample x ``s_per_tflop``."""

    fixed_s: float
    s_per_tflop: float

    def time_s(self, passes: float, tflop: float) -> float:
        """Of so many passes that together take so many operations."""
        return passes * self.fixed_s + tflop * self.s_per_tflop


class CardCosts(Section):
    """Everything measured on one kind of card (or on one CPU core)."""

    card: str
    """As PyTorch names it."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of the card that a process can use; none for a CPU core."""
    date: str
    versions: dict[str, str]
    command: str
    """What measured the entry."""
    notes: list[str] = Field(default_factory=list)
    """What else must be known of how it was measured."""
    is_estimate: bool = False
    """Scaled from another card's by ``DATA_SHEETS``; what was measured is that card's."""
    reference: Reference
    passes: dict[PassName, list[Measurement]]
    rates: dict[RateName, Rate]
    families: dict[str, dict[PassName, list[Measurement]]] = Field(default_factory=dict)
    """Passes that were measured with a family's own network, by the class of its pipeline."""

    def of_family(self, pipeline: str) -> "CardCosts":
        """With the family's own passes in the place of the reference's, where they are known."""
        passes = self.passes | self.families.get(pipeline, {})
        return self.model_copy(update={"passes": passes})

    def pass_cost(self, name: PassName) -> PassCost:
        """A line through the smallest and the largest batch that were measured.

        Raises:
            CostsError: the pass was not measured.
        """
        points = sorted(self.measured(name), key=lambda point: point.batch)
        small, large = points[0], points[-1]
        slope = fixed_s = 0.0
        if large.batch > small.batch:
            slope = (large.seconds - small.seconds) / (large.tflop - small.tflop)
            fixed_s = small.seconds - slope * small.tflop
        if slope <= 0 or fixed_s < 0:
            # One batch, noise, or a small batch that is the more efficient: time is operations.
            return PassCost(fixed_s=0.0, s_per_tflop=large.seconds / large.tflop)
        return PassCost(fixed_s=fixed_s, s_per_tflop=slope)

    def measured(self, name: PassName) -> list[Measurement]:
        """Raises CostsError where the pass was not measured."""
        if not self.passes.get(name):
            raise self._not_measured(repr(name))
        return self.passes[name]

    def rate(self, name: RateName) -> Rate:
        """Raises CostsError where it was not measured."""
        if name not in self.rates:
            raise self._not_measured(f"rate {name!r}")
        return self.rates[name]

    def _not_measured(self, what: str) -> CostsError:
        return CostsError(
            f"the table of costs has no {what} for {self.card}; measure it with "
            "scripts/bench_costs.py"
        )


class CostTable(Section):
    """Entries by the short name of a card, as ``--card`` takes it."""

    cards: dict[str, CardCosts]

    def of(self, card: str) -> CardCosts:
        """Raises CostsError for a card that was neither measured nor can be estimated."""
        if card in self.cards:
            return self.cards[card]
        if card in DATA_SHEETS and MEASURED_SHEET[0] in self.cards:
            return _estimate(self.cards[MEASURED_SHEET[0]], card)
        raise CostsError(
            f"no measured costs for card {card!r}; known are {', '.join(sorted(self.cards))}, and "
            f"as estimates {', '.join(DATA_SHEETS)} (scripts/bench_costs.py measures another one)"
        )


def _estimate(measured: CardCosts, card: str) -> CardCosts:
    """Passes by products a second, AdamW and widening by memory's; copies between processes as
    measured."""
    name, memory_gib, tflops, gb_s = DATA_SHEETS[card]
    slower, thinner = MEASURED_SHEET[1] / tflops, MEASURED_SHEET[2] / gb_s
    factors = {"matrix": slower, "optimizer": thinner, "widening": thinner}
    passes = {
        kind: [p.model_copy(update={"seconds": p.seconds * slower}) for p in points]
        for kind, points in measured.passes.items()
    }
    rates = {
        kind: rate.model_copy(update={"seconds": rate.seconds * factors.get(kind, 1.0)})
        for kind, rate in measured.rates.items()
    }
    changes = {"card": name, "memory_gib": memory_gib, "passes": passes, "rates": rates}
    return measured.model_copy(update=changes | {"is_estimate": True})


def load_costs(path: Path | None = None) -> CostTable:
    """Read a table; without a path the one of this package.

    Raises:
        CostsError: the file is missing, not JSON, or not a table of costs.
    """
    source = files("g2rpo_ray.plan") / "costs.json" if path is None else path
    try:
        tree = json.loads(source.read_text(encoding="utf-8"))
        return CostTable.model_validate(tree)
    except (OSError, UnicodeDecodeError) as error:
        raise CostsError(f"--costs {source}: cannot be read: {cause_of(error, source)}") from error
    except json.JSONDecodeError as error:
        raise CostsError(f"--costs {source}: not JSON: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise CostsError(f"--costs {source}: {key}: {problem['msg']}") from error
