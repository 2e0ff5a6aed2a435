"""What accelerated completions cost in accuracy, on the tiny trained model.

    python scripts/bench_accelerations.py --prompts 16 --json accelerations.json
    python scripts/bench_accelerations.py --config scripts/tiny_world/hard_run.yaml --json hard.json

Every prompt is drawn exactly and by each variant, with the same noise, and scored by the tiny
world's HPS and CLIP. Compared are the integrated advantages: Spearman's rank correlation inside
each group of members, averaged; the same over all members at once; and the share of equal signs.
Times at true size come from ``bench_rollout.py --variants``.
"""

import json
from pathlib import Path

import numpy as np
import torch

import measuring
import program
from bench_rollout import VARIANTS
from comparing.runs import local_worker
from g2rpo_ray.config import Config
from g2rpo_ray.evaluation.scoring.report import rank_correlation
from g2rpo_ray.evaluation.statistics import Floats
from g2rpo_ray.maths.advantage import integrate_advantages
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import Prompt, evenly, read_config_prompts

FROZEN = "frozen_float8"
"""The base in 8 bits beside fresh adapters, which change nothing; no acceleration, but as rough."""


def main() -> None:
    parser = measuring.make_parser(__doc__, needs_file=True)
    parser.add_argument(
        "--config", type=Path, help="of a run, with rewards hps and clip (the tiny one)"
    )
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts to draw")
    parser.add_argument("--only", action="append", help="a variant; may be given repeatedly (all)")
    options = parser.parse_args()
    exact_config = make_config("exact", options.config)
    texts = evenly(read_config_prompts(exact_config, exact_config.prompts.heldout), options.prompts)
    encoder = TextEncoder(exact_config.model, exact_config.prompts.max_sequence_length)
    prompts = [Prompt(number, text, encoder.encode(text)) for number, text in enumerate(texts)]
    exact, evaluations = advantages(exact_config, prompts)
    print(f"exact: {evaluations} evaluations a prompt")
    results = {}
    for variant in options.only or [*(name for name in VARIANTS if name != "exact"), FROZEN]:
        values, variant_evaluations = advantages(make_config(variant, options.config), prompts)
        groups = [rank_correlation(a, b) for a, b in zip(exact, values, strict=True)]
        pooled = rank_correlation(exact.flatten(), values.flatten())
        results[variant] = {
            "evaluations": variant_evaluations,
            "rank_correlation": round(float(np.nanmean(groups)), 4),
            "lowest_group": round(float(np.nanmin(groups)), 4),
            "rank_correlation_pooled": round(pooled, 4),
            "equal_signs": round(float((np.sign(exact) == np.sign(values)).mean()), 4),
        }
        print(variant, json.dumps(results[variant]))
    content = {"prompts": len(prompts), "exact_evaluations": evaluations, "variants": results}
    measuring.write_json(options.json, content)


def make_config(variant: str, path: Path | None = None) -> Config:
    """A run's model and rewards, by default the quickstart's, at the paper's T, K, G and
    granularities, on the CPU."""
    settings = ["run_dir=unused", *measuring.settings("accelerations")]
    if variant == FROZEN:
        settings += measuring.settings("frozen_float8")
    else:
        chosen = VARIANTS[variant].items()
        settings += [f"rollout.{key}={json.dumps(value)}" for key, value in chosen]
    return measuring.run_config(settings, ["clip", "hps"], path)


def advantages(config: Config, prompts: list[Prompt]) -> tuple[Floats, int]:
    """Integrated advantages ``[prompts * K, M]``, and the evaluations of one prompt."""
    worker = local_worker(config)
    values = []
    for prompt in prompts:
        summary, group = worker.rollout(prompt, prompt.prompt_id, iteration=0)
        integrated = integrate_advantages(
            group.rewards,
            [config.rewards[name].weight for name in group.reward_names],
            clamp=config.advantage.clamp,
            min_spread=config.advantage.min_spread,
        )
        values.append(integrated.values)
    return torch.cat(values).double().numpy(), summary.evaluations


if __name__ == "__main__":
    program.run(main)
