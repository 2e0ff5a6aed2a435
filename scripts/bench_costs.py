"""Measures what ``g2rpo plan`` predicts from, and writes it as an entry of a table of costs.

    python scripts/bench_costs.py --json costs.json            # one card, true-size FLUX.1-dev
    python scripts/bench_costs.py --json costs.json --tiny     # one CPU core, the quickstart's size

Networks have their true sizes and random weights, made on the device: no downloads. Each stage has
its own process and time limit; one that fails or is too slow is named and left out, the rest goes
on, and the file is written after every stage. Other cards' entries in the file stay as they are.
"""

import multiprocessing
import os
import pickle
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Libraries ask for cards when they are imported; CUDA, once initialised, would not survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import diffusers
import torch
from torch import Tensor
from torch.nn import functional

import measuring
import program
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import LoraSection
from g2rpo_ray.config.learner import LearnerSection
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import Family
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.frozen_float8 import float8_linear, widened
from g2rpo_ray.models.kernels import compile_blocks, compile_decoder
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.loading import on_meta
from g2rpo_ray.models.lora import add_lora
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.models.weights import PackedWeights, receipt, trainable_parameters
from g2rpo_ray.plan.costs import (
    CardCosts,
    CostsError,
    CostTable,
    Measurement,
    PassName,
    Rate,
    RateName,
    load_costs,
)
from g2rpo_ray.plan.memory import LEARNER_FORWARDS, learner_pass_name
from g2rpo_ray.plan.networks import decode_operations, evaluation_operations, scorer_size
from g2rpo_ray.rewards.registry import make_scorer


@dataclass(frozen=True)
class Card:
    """What is measured on."""

    name: str
    memory_gib: float | None


Found = tuple[PassName, Measurement] | tuple[RateName, Rate] | Card
Stage = Callable[[], Iterator[Found]]


@dataclass(frozen=True)
class Bench:
    """Architectures, sizes and batches; each stage gives what it measured, by the table's names."""

    device: torch.device
    dtype: torch.dtype
    family: Family
    side: int
    """Height and width of a picture, pixels."""
    text_tokens: int
    batches: tuple[int, int]
    """Of evaluations."""
    decode_batches: tuple[int, int]
    score_batches: tuple[int, int]
    learners: dict[int | None, dict[bool, tuple[int, ...]]]
    """LoRA rank (none: all weights) -> gradient checkpointing -> batches."""
    matrix_side: int
    parameters: int
    """The optimizer's, and about so many of the policy's to time the weights' way."""
    scorers: dict[str, dict[str, Any] | None]
    """Kind -> its options; without, one of true size with random weights."""
    repeats: int

    @property
    def shape(self) -> LatentShape:
        return self.family.latents(self.side, self.side)

    def stages(self) -> Iterator[tuple[str, float, Stage]]:
        """(name, limit in seconds, what to do), the most wanted first."""
        yield "matrix product", 30, self.matrix
        yield "evaluation", 60, partial(self.evaluation, "evaluation")
        yield "decode", 60, partial(self.decode, "decode")
        for rank in self.learners:
            name = "learner, all weights" if rank is None else f"learner, LoRA of rank {rank}"
            yield name, 80, partial(self.learner, rank)
        yield "optimizer", 30, self.optimizer
        yield "widening", 30, self.widening
        yield "weight transfer", 60, self.transfer
        for kind in self.scorers:
            yield f"score_{kind}", 80, partial(self.score, kind)
        if self.on_card:
            yield "evaluation_compiled", 100, partial(self.evaluation, "evaluation_compiled")
            yield "decode_compiled", 100, partial(self.decode, "decode_compiled")

    def card(self) -> Iterator[Found]:
        """What is measured on."""
        if self.device.type == "cpu":
            yield Card(f"one core, {_processor()}", None)
        else:
            memory_gib = torch.cuda.mem_get_info()[1] / measuring.GIB
            yield Card(torch.cuda.get_device_name(), round(memory_gib, 1))

    def matrix(self) -> Iterator[Found]:
        """Rate of a large square product, to judge the card by."""
        side = self.matrix_side
        seconds = measuring.matrix_s(side, self.dtype, self.device, self.repeats)
        yield "matrix", Rate(amount=2 * side**3, seconds=seconds)

    @torch.no_grad()
    def evaluation(self, name: PassName) -> Iterator[Found]:
        """Velocity predictions as the rollout makes them."""
        policy = self.policy()
        if name == "evaluation_compiled":
            compile_blocks(policy, cache=None, trained=False)
        for batch in self.batches:
            yield name, self.measure(batch, self.evaluation_tflop(), self.call(policy, batch))

    def decode(self, name: PassName) -> Iterator[Found]:
        """Latents to uint8 pictures on the CPU."""
        vae = self.on_device(on_meta(self.family, "vae")).eval()
        if name == "decode_compiled":
            compile_decoder(vae.decoder)
        tflop = decode_operations(self.family, on_meta(self.family, "vae"), self.shape).tflop
        for batch in self.decode_batches:
            decoder = PictureDecoder(self.family, vae, self.shape, batch)
            latents = torch.randn(batch, *self.shape.packed, device=self.device)
            yield name, self.measure(batch, tflop, partial(decoder.decode, latents))

    def learner(self, rank: int | None) -> Iterator[Found]:
        """Forward and backward pass, accumulating gradients as between two optimizer steps."""
        # With cuDNN's attention (torch 2.11, H100) these passes end in an illegal memory access.
        torch.backends.cuda.enable_cudnn_sdp(False)
        policy = self.policy()
        if rank is None:
            policy.requires_grad_(True)
        else:
            lora = LoraSection(rank=rank, alpha=2.0 * rank)
            add_lora(policy.transformer, lora, policy.family, seed=0)
        trained = sum(p.numel() for p in trainable_parameters(policy).values())
        forward: Callable[..., Tensor] = policy
        backward: Callable[[Tensor], object] = Tensor.backward
        # fp32 master weights and moments of 12 B parameters need more than one card.
        if not self.on_card or trained <= 10**9:
            from g2rpo_ray.learner.engine import LearnerEngine

            if not torch.distributed.is_initialized():
                measuring.join_alone(self.device)
            engine = LearnerEngine(policy, LearnerSection())
            forward, backward = engine, partial(engine.backward, last=False)
        for checkpointing, batches in self.learners[rank].items():
            name = learner_pass_name(rank is not None, checkpointing)
            if checkpointing:
                policy.transformer.enable_gradient_checkpointing()
            else:
                policy.transformer.disable_gradient_checkpointing()
            tflop = LEARNER_FORWARDS[name] * self.evaluation_tflop(rank)
            for batch in batches:
                predict = self.call(policy, batch, forward)

                def run(predict: Callable[[], Tensor] = predict) -> None:
                    backward(predict().square().mean())

                yield name, self.measure(batch, tflop, run)

    def optimizer(self) -> Iterator[Found]:
        """One AdamW step over fp32 weights, as a learner rank makes it on its shard."""
        weights = torch.zeros(self.parameters, device=self.device)
        weights.requires_grad_(True).grad = torch.randn_like(weights)
        optimizer = torch.optim.AdamW([weights], lr=1e-6)
        optimizer.step()
        before = torch.cuda.memory_allocated()
        seconds = self.median_s(optimizer.step)
        scratch = (torch.cuda.max_memory_allocated() - before) / weights.numel()
        note = f"AdamW took {scratch:.1f} B of scratch a parameter" if scratch else ""
        yield "optimizer", Rate(amount=weights.numel(), seconds=seconds, note=note)

    @torch.no_grad()
    def widening(self) -> Iterator[Found]:
        """What products with weights in 8 bits take longer."""
        side = self.matrix_side
        bits = torch.zeros(side, side, dtype=torch.uint8, device=self.device)
        scale = torch.ones(side, 1, dtype=self.dtype, device=self.device)
        weight, layers = widened(bits, scale), max(1, self.parameters // side**2)
        x = torch.zeros(2 * self.text_tokens, side, dtype=self.dtype, device=self.device)
        wide_s = self.median_s(lambda: [functional.linear(x, weight) for _ in range(layers)])
        seconds = self.median_s(
            lambda: [float8_linear(x, bits, scale, None) for _ in range(layers)]
        )
        yield "widening", Rate(amount=layers * side**2, seconds=seconds - wide_s)

    @torch.no_grad()
    def transfer(self) -> Iterator[Found]:
        """Weights from the learner's device through Ray's serialisation to another model's."""
        source = dict(trainable_parameters(self.policy().requires_grad_(True)))
        part: dict[str, Tensor] = {}
        while sum(p.numel() for p in part.values()) < self.parameters and source:
            name, parameter = source.popitem()
            part[name] = parameter.detach()

        def sync() -> None:
            # Learner.export_weights, the object store's pickling, RolloutWorker.receive_weights.
            receipt(1, part)
            packed = pickle.dumps(PackedWeights.of(part), protocol=5)
            arrived = pickle.loads(packed).to(self.device)
            for name, weights in part.items():
                weights.copy_(arrived[name])
            receipt(1, part)

        amount = sum(p.numel() * p.element_size() for p in part.values())
        yield "sync_object_store", Rate(amount=amount, seconds=self.median_s(sync, repeats=3))

    def score(self, kind: str) -> Iterator[Found]:
        """A request from uint8 pictures to scores, preprocessing included."""
        name: PassName = "score_hps" if kind == "hps" else "score_clip"
        options = self.scorers[kind]
        with tempfile.TemporaryDirectory() as folder:
            if options is None:
                options = measuring.write_scorer(Path(folder) / "random.pt", self.device)
                options |= {"dtype": "float32"}
            scorer = make_scorer(kind, options, self.device.type)
        tflop = scorer_size(options["architecture"]).image.tflop
        for batch in self.score_batches:
            # Their prompt's features are cached, as in a run.
            pictures = torch.randint(0, 256, (batch, self.side, self.side, 3)).to(torch.uint8)
            run = partial(scorer.score, pictures, [measuring.PROMPT] * batch)
            yield name, self.measure(batch, tflop, run)

    def policy(self) -> Policy:
        """A frozen policy with random weights."""
        transformer = self.on_device(on_meta(self.family, "transformer"))
        transformer.eval().requires_grad_(False)
        return Policy(self.family, transformer, self.shape, guidance=3.5)

    def on_device(self, network: Any) -> Any:
        """A network from the meta device, in the bench's precision, with small random weights."""
        network = network.to(self.dtype).to_empty(device=self.device)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=0.02)
        return network

    def call(
        self, policy: Policy, batch: int, forward: Callable[..., Tensor] | None = None
    ) -> Callable[[], Tensor]:
        """The network on a batch of one prompt."""
        embeds = measuring.random_conditioning(
            self.family, policy.transformer, self.text_tokens, self.dtype
        )
        x = torch.randn(batch, *self.shape.packed, device=self.device)
        sigma = torch.full((batch,), 0.5, device=self.device)
        return partial(forward or policy, x, sigma, embeds.to(self.device))

    def evaluation_tflop(self, rank: int | None = None) -> float:
        transformer = on_meta(self.family, "transformer")
        if rank is not None:
            with torch.device("meta"):
                add_lora(transformer, LoraSection(rank=rank, alpha=2.0 * rank), self.family, seed=0)
        policy = Policy(self.family, transformer, self.shape, guidance=3.5)
        return evaluation_operations(policy, self.text_tokens).tflop

    def measure(self, batch: int, sample_tflop: float, run: Callable[[], object]) -> Measurement:
        """Median time and peak memory of ``run``, which computes a batch."""
        run()
        before = torch.cuda.memory_allocated()
        seconds = self.median_s(run)
        peak_gib = (torch.cuda.max_memory_allocated() - before) / measuring.GIB
        return Measurement(
            batch=batch,
            seconds=seconds,
            tflop=batch * sample_tflop,
            activations_gib=round(peak_gib, 3) if self.on_card else None,
        )

    def median_s(self, run: Callable[[], object], repeats: int | None = None) -> float:
        """Median seconds of ``run`` after one call to warm up; restarts the peak of memory."""
        run()
        if self.on_card:
            torch.cuda.reset_peak_memory_stats()
        return measuring.median_s(run, repeats or self.repeats, warm_up=0)

    @property
    def on_card(self) -> bool:
        return self.device.type == "cuda"


def true_size() -> Bench:
    """FLUX.1-dev at 720 x 720 with 512 text tokens, bf16, and ViT-H-14 scorers, on the card."""
    return Bench(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        family=Flux1(Flux1.published["FLUX.1-dev"].configs),
        side=720,
        text_tokens=512,
        batches=(1, 8),
        decode_batches=(1, 8),
        score_batches=(8, 32),
        # All weights first: DeepSpeed keeps a model alive after its stage.
        learners={None: {True: (1, 4)}, 64: {True: (1, 4), False: (1,)}},
        matrix_side=8192,
        parameters=10**9,
        scorers=dict.fromkeys(("hps", "clip"), None),
        repeats=5,
    )


def tiny_size() -> Bench:
    """The quickstart's networks and batches on one thread of the CPU, float32."""
    config = measuring.run_config([])
    folder = resolve_path(config.model.path)
    request = config.sampling.members * len(config.g2rpo.granularities)
    return Bench(
        device=torch.device("cpu"),
        dtype=torch.float32,
        family=open_family(folder),
        side=config.sampling.height,
        text_tokens=config.prompts.max_sequence_length,
        batches=(1, config.rollout.planned_batch_size),
        decode_batches=(1, config.rollout.decode_batch_size),
        score_batches=(request // 2, request),
        learners={None: {False: (1, 8)}},
        matrix_side=1024,
        parameters=10**6,
        scorers={kind: config.rewards[kind].options for kind in ("hps", "clip")},
        repeats=15,
    )


def run_apart(limit_s: float, stage: Stage, receive: Callable[[Found], None]) -> str:
    """Run a stage in a process of its own: after a fault, a card is lost to the process.

    Returns:
        What went wrong, in words; empty if nothing did.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send_all, args=(stage, receiving, sending), daemon=True)
    process.start()
    sending.close()
    deadline_s = time.monotonic() + limit_s
    try:
        while receiving.poll(max(0.0, deadline_s - time.monotonic())):
            receive(receiving.recv())
    except EOFError:
        process.join()
        return f"exit code {process.exitcode}" if process.exitcode else ""
    process.kill()
    process.join()
    return f"took longer than {limit_s:g} s"


def _send_all(stage: Stage, receiving: Connection, sending: Connection) -> None:
    receiving.close()
    for found in stage():
        sending.send(found)


@dataclass
class Results:
    """What was measured so far; written after every stage."""

    bench: Bench
    path: Path
    card: Card | None = None
    passes: dict[str, list[Measurement]] = field(default_factory=dict)
    rates: dict[str, Rate] = field(default_factory=dict)

    def add(self, found: Found) -> None:
        """Keep and show a result."""
        if isinstance(found, Card):
            self.card = found
            print(f"  {found.name}")
            return
        name, result = found
        if isinstance(result, Rate):
            self.rates[name] = result
            print(f"  {name}: {result.amount / result.seconds:.4g} a second {result.note}")
            return
        self.passes.setdefault(name, []).append(result)
        print(
            f"  {name}, batch {result.batch}: {result.seconds * 1e3:.2f} ms, "
            f"{result.seconds * 1e3 / result.batch:.2f} a sample, "
            f"{result.tflop / result.seconds:.4g} TFLOP/s, "
            f"activations {result.activations_gib or 0:.2f} GiB"
        )

    def write(self) -> None:
        """Replace this card's entry in the table; the others are kept."""
        assert self.card is not None
        bench, config = self.bench, self.bench.family.configs["transformer"]
        on_card = self.card.memory_gib is not None
        entry = {
            "card": self.card.name,
            "memory_gib": self.card.memory_gib,
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {
                "torch": torch.__version__,
                **{name: version(name) for name in ("diffusers", "deepspeed", "open_clip_torch")},
            },
            "command": "python scripts/bench_costs.py --json costs.json"
            + ("" if on_card else " --tiny"),
            "reference": {
                "tokens": bench.shape.packed[0] + bench.text_tokens,
                "width": config["num_attention_heads"] * config["attention_head_dim"],
                "blocks": config["num_layers"] + config["num_single_layers"],
                "pixels": bench.side**2,
                "dtype": str(bench.dtype).removeprefix("torch."),
            },
            "passes": self.passes,
            "rates": self.rates,
        }
        cards = load_costs(self.path).cards if self.path.exists() else {}
        known = (key for key in ("H100", "H200", "A100", "B200") if key in self.card.name)
        short_name = next(known, self.card.name) if on_card else "cpu-core"
        cards[short_name] = CardCosts.model_validate(entry)
        table = CostTable(cards=cards).model_dump(mode="json", exclude_defaults=True)
        measuring.write_json(self.path, table)


def _processor() -> str:
    found = re.search("^model name.*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def main() -> int:
    """Returns 1 if a stage failed; the others' results are written all the same."""
    parser = measuring.make_parser(__doc__, needs_file=True)
    parser.add_argument("--tiny", action="store_true", help="the quickstart's size, one CPU core")
    options = parser.parse_args()
    if options.json.exists():
        try:
            load_costs(options.json)
        except CostsError as error:
            parser.error(f"{error}; name another file, or delete it")
    if options.tiny:
        torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    bench = tiny_size() if options.tiny else true_size()
    results = Results(bench, options.json)
    if run_apart(60, bench.card, results.add):
        print("no CUDA card here; --tiny measures a CPU core")
        return 1
    failed = []
    for name, limit_s, stage in bench.stages():
        print(f"{name}:")
        seconds, problem = measuring.timed(partial(run_apart, limit_s, stage, results.add))
        if problem:
            failed.append(name)
        print(f"  {problem or 'done'} ({seconds:.1f} s)")
        results.write()
    print(f"failed: {', '.join(failed)}" if failed else "all stages done")
    return 1 if failed else 0


if __name__ == "__main__":
    program.run(main)
