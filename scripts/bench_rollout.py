"""The rollout engine against the published order, on true-size FLUX.1-dev with random weights.

    python scripts/bench_rollout.py --json rollout.json                       # one card
    python scripts/bench_rollout.py --json rollout.json --cards 1,2,4 g2rpo.sde_steps=[0,1]
    python scripts/bench_rollout.py --json rollout.json --variants exact,fast
    python scripts/bench_rollout.py --json rollout.json --tiny                # CPU, a minute

The published order draws one image at a time: the anchor, then for every SDE step, member and
granularity the stochastic step and the whole completion, each evaluation alone under autocast, each
image decoded, encoded by PIL and scored alone. It is measured on whole chains of some SDE steps,
and extrapolated by the counts of evaluations and images. Our engine draws whole prompts through
Ray: rollout workers, reward servers and pool as in a run. ``key=value`` overrides any setting.
"""

import json
import tempfile
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import open_clip
import ray
import torch
from PIL import Image
from torch import Tensor

import measuring
import program
from g2rpo_ray.config import Config
from g2rpo_ray.config.rollout import SPEEDS
from g2rpo_ray.maths.granularity import completion_indices, count_published_order
from g2rpo_ray.maths.sde import SdeStep, euler_step, predict_x0
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.loading import DTYPES, load_part, on_meta
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.plan.networks import policy_size
from g2rpo_ray.prompts.dataset import Prompt
from g2rpo_ray.rewards.scorers.open_clip_model import resolve_architecture
from g2rpo_ray.sampling.engine import RolloutEngine, schedule_of
from g2rpo_ray.sampling.group import GroupKey
from g2rpo_ray.training.roles import launch_rollout

VARIANTS: dict[str, dict[str, Any]] = {
    **SPEEDS,
    "fp8": {"fp8": True},
    **{
        f"stride{stride}_fp8_{above:g}": {
            "completion_stride": stride,
            "fp8": True,
            "fp8_above_sigma": above,
        }
        for stride in (2, 3)
        for above in (0.0, 0.5, 0.75)
    },
    "stride4": {"completion_stride": 4},
}
"""Name -> settings of ``rollout``."""
PUBLISHED = (0, 3, 7)
"""SDE steps on which the published order is measured."""


def main() -> None:
    """The file is written after every stage."""
    parser = measuring.make_parser(__doc__, needs_file=True)
    parser.add_argument("--tiny", action="store_true", help="the quickstart's networks, on the CPU")
    parser.add_argument("--cards", default="1", help="numbers of rollout workers, such as 1,2,4")
    parser.add_argument("--variants", default="exact", help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--no-published", action="store_true", help="leave the comparison out")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA card here; --tiny runs the same code on the CPU")
    with tempfile.TemporaryDirectory() as scratch:
        config = make_config(Path(scratch), options.tiny, options.overrides)
        torch.set_num_threads(config.rollout.threads)
        results = Results(options.json, config)
        # Rates of a large square product, after a pause and as warm as a rollout makes a card.
        side = 1024 if options.tiny else 8192
        product = side, DTYPES[config.model.dtype], device_of(config)
        seconds = {
            "matrix_tflop_per_s": measuring.matrix_s(*product),
            "matrix_in_a_row_tflop_per_s": measuring.matrix_s_in_a_row(
                *product, for_s=0.2 if options.tiny else 4
            ),
        }
        results.add({name: round(2 * side**3 / s / 1e12, 3) for name, s in seconds.items()})
        if not options.no_published:
            published_stage(results, config, [k for k in PUBLISHED if k in config.g2rpo.sde_steps])
        for variant in options.variants.split(","):
            for cards in (int(number) for number in options.cards.split(",")):
                engine_stage(results, config, variant, cards)
    results.summarise()


def make_config(scratch: Path, tiny: bool, overrides: list[str]) -> Config:
    """The quickstart's settings, turned into the benchmark's; two scorers, of ViT-H-14."""
    names = ["rollout_tiny"] if tiny else ["true_size", "rollout"]
    settings = [
        *measuring.settings("random_weights", "rollout_any", *names),
        f"model.path={measuring.write_model_folder(scratch / 'flux', tiny)}",
        f"run_dir={scratch / 'run'}",
    ]
    if not tiny:
        options = measuring.write_scorer(scratch / "scorer.pt")
        for reward in ("hps", "clip"):
            settings.append(f"rewards.{reward}.options={json.dumps(options)}")
    # The oracle knows only the tiny world's prompts.
    return measuring.run_config([*settings, *overrides], ["clip", "hps"])


class Results:
    """What was measured; printed, and written after every stage."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path, self.config = path, config
        self.tflop_per_evaluation = policy_size(config).evaluation.tflop
        self.content: dict[str, Any] = {
            "card": measuring.card_name(device_of(config)),
            "versions": {p: version(p) for p in ("torch", "ray", "diffusers", "open_clip_torch")},
            "settings": {
                "picture": [config.sampling.height, config.sampling.width],
                "steps": config.sampling.steps,
                "members": config.sampling.members,
                **config.g2rpo.model_dump(),
                **config.rollout.model_dump(),
            },
            "tflop_per_evaluation": round(self.tflop_per_evaluation, 2),
            "engine": {},
        }

    def add(self, values: dict[str, Any]) -> None:
        """Keep and show."""
        self.content |= values
        print(json.dumps(values, indent=1))
        measuring.write_json(self.path, self.content)

    def summarise(self) -> None:
        """The ratio, and what several cards give."""
        engine = self.content["engine"]
        first = next(iter(engine.values()))
        values = {k: first[k] for k in ("engine_s_per_prompt", "evaluations")}
        if published := self.content.get("published_s_per_prompt"):
            ratios = {
                name: round(published / e["engine_s_per_prompt"], 3) for name, e in engine.items()
            }
            values |= {"ratio": next(iter(ratios.values())), "ratios": ratios}
        values["efficiency"] = {
            name: round(e["pictures_per_s"] / first["pictures_per_s"] / e["cards"], 3)
            for name, e in engine.items()
        }
        self.add(values)


def published_stage(results: Results, config: Config, sde_steps: list[int]) -> None:
    """Chains of one member in the published order, extrapolated to a prompt."""
    published = PublishedOrder(config)
    published.chain(sde_steps[0], member=0)  # warms up
    for spent in (published.evaluation_s, published.image_s):
        spent.clear()
    for member, k in enumerate(sde_steps):
        published.chain(k, member)
    recipe, members = config.g2rpo, config.sampling.members
    evaluations = count_published_order(
        config.sampling.steps, recipe.sde_steps, recipe.granularities, members
    )
    # The anchor's picture is drawn, too.
    images = 1 + len(recipe.sde_steps) * members * len(recipe.granularities)
    per_evaluation_s = fmean(published.evaluation_s)
    per_image_s = fmean(published.image_s)
    results.add(
        {
            "published_s_per_prompt": evaluations * per_evaluation_s + images * per_image_s,
            "published": {
                "evaluations": evaluations,
                "images": images,
                "ms_per_evaluation": per_evaluation_s * 1e3,
                "ms_per_image_decoded_and_scored": per_image_s * 1e3,
                "measured_evaluations": len(published.evaluation_s),
                "measured_images": len(published.image_s),
                "peak_gib": round(torch.cuda.max_memory_allocated() / measuring.GIB, 2)
                if torch.cuda.is_initialized()
                else None,
            },
        }
    )
    del published
    torch.cuda.empty_cache()


class PublishedOrder:
    """One image at a time, as published code does it, with its time by part."""

    def __init__(self, config: Config) -> None:
        self.config, self.device = config, device_of(config)
        self.policy = load_policy(config, self.device)
        vae = load_part(config.model, "vae", DTYPES[config.model.dtype], self.device)
        self.decoder = PictureDecoder(self.policy.family, vae, self.policy.shape, 1)
        self.scorers = [
            PublishedScorer(r.options["architecture"], self.device) for r in config.rewards.values()
        ]
        self.embeds = random_prompt(config, 0).embeds.to(self.device)
        self.sigmas = schedule_of(config.sampling, config.sampling.steps, self.policy)
        self.evaluation_s: list[float] = []
        self.image_s: list[float] = []

    @torch.no_grad()
    def chain(self, k: int, member: int) -> None:
        """The stochastic step of one member, and its picture on every granularity."""
        sampling, key = self.config.sampling, GroupKey(0, 0)
        shape = self.policy.shape.packed
        x = key.initial_noise(shape)[None].to(self.device)
        step = SdeStep.at(self.sigmas, k, sampling.sde, sampling.eta)
        noise = key.branch_noise(shape, k, sampling.members)[member : member + 1]
        x = step.sample(step.mean(x, self._evaluate(x, k)), noise.to(self.device))
        for granularity in self.config.g2rpo.granularities:
            self._picture(self._complete(x, completion_indices(sampling.steps, k, granularity)))

    def _complete(self, x: Tensor, indices: list[int]) -> Tensor:
        for index, next_index in pairwise(indices):
            v, sigma = self._evaluate(x, index), float(self.sigmas[index])
            x0 = predict_x0(x, v, sigma)
            x = euler_step(x, v, sigma, float(self.sigmas[next_index]))
        return x0

    def _evaluate(self, x: Tensor, index: int) -> Tensor:
        started_s, dtype = measuring.now_s(), DTYPES[self.config.model.dtype]
        with torch.autocast(self.device.type, dtype, self.device.type == "cuda"):
            v = self.policy(x, self.sigmas[index : index + 1].to(self.device), self.embeds)
        self.evaluation_s.append(measuring.now_s() - started_s)
        return v

    def _picture(self, x0: Tensor) -> None:
        started_s = measuring.now_s()
        picture = Image.fromarray(self.decoder.decode(x0)[0].numpy())
        for scorer in self.scorers:
            scorer.score(picture, measuring.PROMPT)
        self.image_s.append(measuring.now_s() - started_s)


class PublishedScorer:
    """Image and text through both towers for every image, preprocessed by PIL, under autocast."""

    def __init__(self, architecture: str, device: torch.device) -> None:
        name, self.device = resolve_architecture(architecture), device
        self.model, _, self.preprocess = open_clip.create_model_and_transforms(
            name, load_weights=False, device=device
        )
        self.tokenizer = open_clip.get_tokenizer(name)

    @torch.no_grad()
    def score(self, picture: Image.Image, text: str) -> float:
        image = self.preprocess(picture)[None].to(self.device)
        tokens = self.tokenizer([text]).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            image_features = self.model.encode_image(image, normalize=True)
            text_features = self.model.encode_text(tokens, normalize=True)
        return float((image_features * text_features).sum())


def engine_stage(results: Results, config: Config, variant: str, cards: int) -> None:
    """Whole prompts, one a worker, through the roles of a run; as many replicas of each scorer."""
    replicas = {"min_replicas": cards, "max_replicas": cards}
    changes = {
        "rollout": config.rollout.model_copy(update=VARIANTS[variant] | {"workers": cards}),
        "rewards": {name: r.model_copy(update=replicas) for name, r in config.rewards.items()},
    }
    config = config.model_copy(update=changes)
    compared = "published" in results.content and cards == 1 and variant == "exact"
    evaluation_s = batch_evaluation_s(config) if compared else None
    print(f"{variant}, {cards} workers:")
    with launch_rollout(config, [], print) as (_, pool):
        prompts = [ray.put(random_prompt(config, number)) for number in range(cards)]
        draw = partial(pool.generate, prompts, 0, lambda *_: None)
        wall_s, (summaries, _) = measuring.timed(draw)
    first = summaries[0]
    denoise_s = max(s.seconds["denoise_s"] for s in summaries)
    rate = first.evaluations * results.tflop_per_evaluation / denoise_s
    found = {
        "cards": cards,
        "engine_s_per_prompt": round(wall_s, 3),
        "evaluations": first.evaluations,
        "pictures": first.pictures,
        "pictures_per_s": round(cards * first.pictures / wall_s, 3),
        "evaluations_per_s": round(cards * first.evaluations / wall_s, 2),
        "tflop_per_s": round(rate, 2),
        "utilisation": round(rate / results.content["matrix_tflop_per_s"], 3),
        "utilisation_in_a_row": round(rate / results.content["matrix_in_a_row_tflop_per_s"], 3),
        "seconds": {k: [round(s.seconds[k], 2) for s in summaries] for k in first.seconds},
        "peak_gib": max(s.peak_gib for s in summaries),
        "warnings": [w for s in summaries for w in s.warnings],
    }
    if evaluation_s is not None:
        alone_s = first.evaluations * evaluation_s
        found["evaluations_alone_s"] = round(alone_s, 2)
        found["decode_and_score_share"] = round(1 - alone_s / wall_s, 3)
    results.content["engine"][f"{variant}, {cards}"] = found
    results.add({"last": f"{variant}, {cards}", **found})


def batch_evaluation_s(config: Config) -> float:
    """Seconds of one evaluation in a full batch, with nothing beside it."""
    engine = RolloutEngine(config, device_of(config))
    rows, embeds = engine.batch_size, random_prompt(config, 0).embeds.to(engine.device)
    x = torch.randn(rows, *engine.policy.shape.packed, device=engine.device)
    sigma = torch.full((rows,), 0.5, device=engine.device)
    seconds = measuring.median_s(partial(engine.estimate, x, sigma, embeds), repeats=5) / rows
    del engine
    torch.cuda.empty_cache()
    return seconds


def random_prompt(config: Config, number: int) -> Prompt:
    family, length = open_family(Path(config.model.path)), config.prompts.max_sequence_length
    conditioning = measuring.random_conditioning(
        family, on_meta(family, "transformer"), length, DTYPES[config.model.dtype], seed=number
    )
    return Prompt(number, f"{measuring.PROMPT} {number}", conditioning)


def device_of(config: Config) -> torch.device:
    return torch.device("cuda" if config.rollout.gpus_per_worker > 0 else "cpu")


if __name__ == "__main__":
    program.run(main)
