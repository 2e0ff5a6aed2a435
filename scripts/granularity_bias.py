"""How well the advantages of each set of granularities rank branches, on fixed weights.

    python scripts/granularity_bias.py --prompts 64 --data runs/bias.npz --set sampling.steps=16 \
        --plot bias.svg --markdown bias.md

At each SDE step k of an anchor, the members of a group are completed on every granularity, as in
training. What a member is worth is measured apart from that, twice:

- ``fine``: mean reward of completions from the same branch on finer schedules;
- ``push``: reward where the ODE's own latents are moved a little along the member's noise, less the
  reward where they are moved against it: what a policy wins that learns the member's direction.

The table gives the correlation, inside groups, of the integrated advantage with both. A stochastic
step may also span several steps of the schedule (``merged``, as in E-GRPO). Prompts that a file
holds are not drawn again; intervals are 95%, by bootstrap over prompts.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

import measuring
import program
from comparing.ranking import FINE, Correlations, all_ways, markdown, plot, rows_of, with_interval
from comparing.runs import local_worker
from comparing.scoring import LocalScoring
from g2rpo_ray.config import load_config
from g2rpo_ray.maths.granularity import completion_indices
from g2rpo_ray.maths.sde import SdeStep, euler_step
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.weights import load_weights
from g2rpo_ray.prompts.dataset import read_config_prompts
from g2rpo_ray.rollout.worker import RolloutWorker
from g2rpo_ray.sampling.group import GroupKey
from g2rpo_ray.sampling.sampler import Sampler
from side_by_side import side_by_side


@dataclass(frozen=True)
class Study:
    """What is drawn, in any process alike."""

    config: Path
    overrides: tuple[str, ...]
    push: float
    """Of the stochastic step's standard deviation."""
    weights: Path | None
    """Of a run of ``compare_algorithms.py``; none are the base model's."""


@lru_cache(maxsize=1)
def _roles(study: Study) -> tuple[RolloutWorker, TextEncoder, list[str]]:
    """Once a process."""
    config = load_config(study.config, list(study.overrides))
    worker = local_worker(config)
    if study.weights is not None:
        load_weights(worker.policy, load_file(study.weights, device=str(worker.device)))
    encoder = TextEncoder(config.model, config.prompts.max_sequence_length)
    return worker, encoder, read_config_prompts(config, config.prompts.heldout)


def draw_prompt(job: tuple[Study, int]) -> tuple[int, npt.NDArray[np.float32], int]:
    """One prompt: its number, scores ``[rewards, ways, K, M]`` (NaN where a span does not fit
    before the schedule's end), and the evaluations that it took."""
    study, number = job
    worker, encoder, texts = _roles(study)
    embeds = encoder.encode(texts[number % len(texts)]).to(worker.device)
    key = GroupKey(worker.config.seed, number)
    sampler = worker.engine.sampler(worker.config.sampling.steps)
    before = worker.engine.evaluations
    starts, grids, places = _branches(worker, sampler, embeds, key, study.push)
    x0 = walk(sampler, starts, grids, embeds)
    pictures = worker.engine.decoder.decode(x0)
    scoring, text = worker.scoring, texts[number % len(texts)]
    assert isinstance(scoring, LocalScoring)
    trained, members = worker.config.g2rpo.sde_steps, worker.config.sampling.members
    scores = np.full(
        (len(scoring.names), len(all_ways()), len(trained), members), np.nan, np.float32
    )
    for row, name in enumerate(scoring.names):
        parts = pictures.split(512)
        got = [scoring.submit(0, text, part, [name]).result()[name] for part in parts]
        for place, values in zip(places, torch.cat(got).split(members), strict=True):
            scores[row, *place] = values.numpy()
    return number, scores, worker.engine.evaluations - before


def _branches(
    worker: RolloutWorker, sampler: Sampler, embeds: Conditioning, key: GroupKey, push: float
) -> tuple[Tensor, list[list[float]], list[tuple[int, int]]]:
    """Rows to be walked, the noise levels that each visits, and (way, k) of every M rows."""
    config, shape = worker.config, sampler.shape.packed
    sampling, device = config.sampling, worker.device
    anchor = sampler.trajectory(key.initial_noise(shape)[None].to(device), embeds)
    finer = {n: worker.engine.sampler(n).sigmas.tolist() for n in (8, *FINE)}
    starts, grids, places = [], [], []
    for position, k in enumerate(config.g2rpo.sde_steps):
        noise = key.branch_noise(shape, k, sampling.members).to(device)
        for number, way in enumerate(all_ways()):
            end = k + way.span
            if end > sampler.steps - 1:
                continue
            sigma, sigma_next = float(sampler.sigmas[k]), float(sampler.sigmas[end])
            step = SdeStep(sampling.sde, sampling.eta, sigma, sigma_next)
            if way.kind in ("ahead", "behind"):
                moved = push * step.std * (1 if way.kind == "ahead" else -1)
                start = anchor.latents[end] + moved * noise
            else:
                start = step.sample(step.mean(anchor.latents[k], anchor.velocities[k]), noise)
            if way.kind == "grid":
                visited = completion_indices(sampler.steps, end - 1, way.number)[:-1]
                grid = [float(sampler.sigmas[index]) for index in visited]
            else:
                below = [s for s in finer[way.number] if 0 < s < sigma_next - 1e-6]
                grid = [sigma_next, *below]
            starts.append(start)
            grids += [grid] * len(start)
            places.append((number, position))
    return torch.cat(starts), grids, places


@torch.no_grad()
def walk(
    sampler: Sampler, starts: Tensor, grids: Sequence[Sequence[float]], embeds: Conditioning
) -> Tensor:
    """x_0 of latents ``[B, tokens, channels]`` that each walk noise levels of their own by Euler's
    method; the last evaluation of a grid gives its x_0."""
    order = sorted(range(len(grids)), key=lambda row: -len(grids[row]))
    x, results = starts[order], torch.empty_like(starts)
    levels = [[*grids[row], 0.0] for row in order]
    going = len(order)
    for place in range(len(levels[0]) - 1):
        while len(levels[going - 1]) - 1 <= place:
            going -= 1
        x = x[:going]
        now, after = (torch.tensor([row[p] for row in levels[:going]]) for p in (place, place + 1))
        now, after = now.to(x), after.to(x)
        v = sampler.exact(x, now, embeds)
        x = euler_step(x, v, now[:, None, None], after[:, None, None])
        results[order[:going]] = x
    return results


def read_data(path: Path | None) -> dict[int, npt.NDArray[np.float32]]:
    """Scores of the prompts that a file holds."""
    if path is None or not path.exists():
        return {}
    try:
        with np.load(path) as file:
            return dict(zip(file["prompts"].tolist(), file["scores"], strict=True))
    except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile) as error:
        raise measuring.FileError(f"--data {path}: no scores of this script: {error}") from error


def collect(study: Study, options: argparse.Namespace) -> dict[int, npt.NDArray[np.float32]]:
    """Draw what is missing; the file is written anew every ten seconds and at the end."""
    done = read_data(options.data)
    jobs = [(study, number) for number in range(options.prompts) if number not in done]
    started_s = saved_s = time.monotonic()
    evaluations, drawn = 0, len(jobs)
    for number, scores, spent in side_by_side(
        draw_prompt, jobs, options.processes, cards=options.cards, limit_s=options.limit_s
    ):
        done[number] = scores
        evaluations += spent
        drawn -= 1
        if time.monotonic() - saved_s > 10 or not drawn:
            _save(done, options.data)
            saved_s = time.monotonic()
            seconds = saved_s - started_s
            print(f"{len(done)} prompts, {evaluations:,} evaluations, {seconds:.0f} s")
    if done:
        _save(done, options.data)
    return done


def _save(done: dict[int, npt.NDArray[np.float32]], path: Path) -> None:
    prompts = sorted(done)
    part = path.with_name(path.stem + ".part.npz")
    np.savez_compressed(part, prompts=prompts, scores=np.stack([done[n] for n in prompts]))
    part.replace(path)


def main() -> int:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--config", type=Path, default=measuring.ROOT / "configs/quickstart.yaml")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="that a run ended with")
    parser.add_argument("--prompts", type=int, default=64, help="held-out ones, a group each and k")
    parser.add_argument("--push", type=float, default=0.5, help="of the step's std (0.5)")
    parser.add_argument("--data", type=Path, required=True, help="file of the scores (.npz)")
    parser.add_argument("--processes", type=int, default=1, help="side by side")
    parser.add_argument("--cards", type=int, default=0, help="to share; 0: the CPU")
    parser.add_argument("--limit-s", type=float, default=0.0, help="draw no longer than this")
    parser.add_argument("--plot", type=program.output, help="write the figure as SVG")
    parser.add_argument("--markdown", type=program.output, help="write the tables")
    options = parser.parse_args()
    card = [*measuring.settings("shared_card"), "rollout.batch_size=4096"]
    overrides = (*options.set, *(card if options.cards else []))
    study = Study(options.config, overrides, options.push, options.weights)
    done = collect(study, options)
    if not done:
        print("no prompt was drawn within --limit-s", file=sys.stderr)
        return 3
    config = load_config(options.config, list(options.set))
    scores = np.stack([done[number] for number in sorted(done)])
    rows = rows_of(Correlations(scores, sorted(config.rewards), config))
    prompts, _, _, groups, members = scores.shape
    print(f"{prompts} prompts, {prompts * groups} groups, {prompts * groups * members:,} branches")
    text = "\n".join(markdown(rows))
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.plot:
        plot(rows, config.g2rpo.sde_steps, options.plot)
    measuring.write_json(
        options.json,
        [
            {
                name: with_interval(value) if isinstance(value, np.ndarray) else value
                for name, value in row.items()
            }
            for row in rows
        ],
    )
    return 0


if __name__ == "__main__":
    program.run(main)
