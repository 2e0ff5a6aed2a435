"""Check the maths and the rollout engine against exact numbers made by independent code.

    python scripts/check_golden.py tests/golden [--json PATH]

Reads everything it needs from the folder's ``spec.json``, so that folders with other sizes, seeds,
schedules, step sets and granularities are checked alike. Prints the largest relative error of each
section; exit code 1 beyond the tolerance of 1e-5, 2 for a folder that cannot be read.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import measuring
import program
from g2rpo_ray.maths.advantage import integrate_advantages
from g2rpo_ray.maths.granularity import completion_indices, count_g2rpo, count_published_order
from g2rpo_ray.maths.objective import clipped_policy_loss
from g2rpo_ray.maths.schedule import static_shift_schedule
from g2rpo_ray.maths.sde import SdeStep
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.sampler import Sampler

TOLERANCE = 1e-5
CLAMP = 5.0
BATCH_SIZE = 8
"""Smaller than most step sets need, so that batches mix SDE steps, members and granularities."""


@dataclass(frozen=True)
class Golden:
    """A folder of golden numbers."""

    spec: dict[str, Any]
    math: dict[str, Tensor]
    rollout: dict[str, Tensor]
    transformer: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> "Golden":
        return cls(
            json.loads((folder / "spec.json").read_text(encoding="utf-8")),
            load_file(folder / "math.safetensors"),
            load_file(folder / "rollout.safetensors"),
            load_file(folder / "flux.safetensors"),
        )


Errors = Iterator[float]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in the 2-norm; infinite for NaN or other shapes.

    Never NaN: the ``max`` of numbers passes over a NaN that is not the first.
    """
    if actual.shape != expected.shape:
        return math.inf
    difference, size = (actual.double() - expected.double()).norm(), expected.double().norm()
    error = float(difference / size) if size > 0 else float(difference)
    return math.inf if math.isnan(error) else error


def relative_error_of(actual: float, expected: float) -> float:
    """The same of two numbers."""
    numbers = (torch.tensor([value], dtype=torch.float64) for value in (actual, expected))
    return relative_error(*numbers)


def schedules(golden: Golden) -> Errors:
    for case in golden.spec["schedules"]:
        sigmas = static_shift_schedule(case["steps"], case["shift"])
        yield relative_error(sigmas, torch.tensor(case["sigmas"], dtype=torch.float64))


def sde_steps(golden: Golden) -> Errors:
    for case in golden.spec["sde_steps"]:
        sigmas = static_shift_schedule(case["steps"], case["shift"])
        step = SdeStep.at(sigmas, case["index"], case["kind"], case["eta"])
        x, v, noise, mean, next_x, log_prob = (
            golden.math[f"{case['name']}.{key}"]
            for key in ("x", "v", "noise", "mean", "next", "log_prob")
        )
        yield relative_error_of(step.std, case["std"])
        yield relative_error(step.mean(x, v), mean)
        yield relative_error(step.sample(step.mean(x, v), noise), next_x)
        yield relative_error(step.log_prob(next_x, step.mean(x, v)), log_prob)


def completion_grids(golden: Golden) -> Errors:
    for case in golden.spec["completions"]:
        indices = completion_indices(case["steps"], case["sde_step"], case["granularity"])
        sigmas = static_shift_schedule(case["steps"], case["shift"])[indices]
        yield relative_error(sigmas, torch.tensor(case["sigmas"], dtype=torch.float64))
        yield relative_error_of(len(indices) - 1, case["evaluations"])


def evaluation_counts(golden: Golden) -> Errors:
    for case in golden.spec["evaluation_counts"]:
        recipe = (case["steps"], case["sde_steps"], case["granularities"], case["members"])
        yield relative_error_of(count_g2rpo(*recipe).evaluations, case["shared_prefix"])
        yield relative_error_of(count_published_order(*recipe), case["published_order"])


def advantages(golden: Golden) -> Errors:
    # Golden arrays are [granularity, member, step]; ours are [granularity, step, member].
    prefix, results = "advantages.", {"integrated", "clamped"}
    names = [key.removeprefix(prefix) for key in golden.math if key.startswith(prefix)]
    rewards = {
        name: golden.math[prefix + name].transpose(-1, -2)
        for name in names
        if name not in results and not name.endswith("_first_granularity")
    }
    together = torch.stack(list(rewards.values()))

    def integrate(values: Tensor, clamp: float) -> Tensor:
        weights = [1.0] * len(values)
        return integrate_advantages(values, weights, clamp=clamp, min_spread=1e-9).values.T

    for name, reward in rewards.items():
        first = golden.math.get(f"{prefix}{name}_first_granularity")
        if first is not None:
            yield relative_error(integrate(reward[None, :1], float("inf")), first)
    yield relative_error(integrate(together, float("inf")), golden.math[prefix + "integrated"])
    yield relative_error(integrate(together, CLAMP), golden.math[prefix + "clamped"])


def loss_and_gradient(golden: Golden) -> Errors:
    case = golden.spec["loss"]
    sigmas = static_shift_schedule(case["steps"], case["shift"])
    step = SdeStep.at(sigmas, case["index"], case["kind"], case["eta"])
    for clip in case["clips"]:
        v = golden.math["loss.v"].clone().requires_grad_()
        log_prob = step.log_prob(golden.math["loss.next"], step.mean(golden.math["loss.x"], v))
        loss = clipped_policy_loss(
            log_prob, golden.math["loss.log_prob_old"], golden.math["loss.advantages"], clip
        ).loss
        loss.backward()
        assert v.grad is not None
        yield relative_error(log_prob.detach(), golden.math["loss.log_prob_new"])
        yield relative_error(loss.detach().view(1), golden.math[f"loss.{clip}.value"])
        yield relative_error(v.grad, golden.math[f"loss.{clip}.grad"])


class TimeSines(nn.Module):
    """FLUX.1's sines of the timestep, of the phases that it has in float32, alike on every CPU.

    Phases are up to 1000 (timestep) times ``exp`` in float32, whose last bit differs between CPUs:
    6e-5 in a phase, and up to 1e-5 in the latents. Here ``exp`` is correctly rounded.
    """

    def forward(self, timestep: Tensor) -> Tensor:
        """float ``[B]`` to float64 ``[B, 256]``."""
        exponents = -math.log(10_000) * torch.arange(128, dtype=torch.float32) / 128
        frequencies = torch.exp(exponents.double()).float()
        phases = (timestep.float()[:, None] * frequencies).double()
        return torch.cat([phases.cos(), phases.sin()], dim=-1)


def whole_rollout(golden: Golden) -> Errors:
    """Our batched engine with shared prefixes, in float64, against latents made one at a time."""
    spec = golden.spec["rollout"]
    numbers = {name: tensor.double() for name, tensor in golden.rollout.items()}
    transformer = FluxTransformer2DModel(**spec["transformer_config"])
    transformer.load_state_dict(golden.transformer)
    transformer.double().time_text_embed.time_proj = TimeSines()
    shape = LatentShape(
        spec["latent_height"], spec["latent_width"], spec["transformer_config"]["in_channels"]
    )
    policy = Policy(Flux1({}), transformer.eval(), shape, spec["guidance"])
    # The engine's own arithmetic; the schedule module says why it is float32.
    sigmas = static_shift_schedule(spec["steps"], spec["shift"], torch.float32)
    sampler = Sampler(Evaluator(policy, BATCH_SIZE), sigmas)
    embeds = Conditioning(
        {"t5": numbers["prompt_embeds"][0], "pooled": numbers["pooled_prompt_embeds"][0]}
    )

    anchor = sampler.trajectory(numbers["initial_noise"], embeds)
    visited = torch.cat([anchor.latents, anchor.x0[None]])
    yield relative_error(visited.transpose(0, 1), numbers["anchor_latents"])
    yield relative_error(anchor.x0, numbers["anchor_x0"])

    branches, log_probs = [], []
    for position, k in enumerate(spec["sde_steps"]):
        step = SdeStep.at(sigmas, k, spec["kind"], spec["eta"])
        mean = step.mean(anchor.latents[k], anchor.velocities[k])
        branches.append(step.sample(mean, numbers["sde_noise"][position]))
        log_probs.append(step.log_prob(branches[-1], mean))
    yield relative_error(torch.stack(branches), numbers["next_latents"])
    yield relative_error(torch.stack(log_probs), numbers["log_probs"])

    results = dict(
        sampler.completions(torch.stack(branches), spec["sde_steps"], spec["granularities"], embeds)
    )
    # Golden is [step, member, granularity, ...]; ours is [granularity, member, ...] by step.
    ours = torch.stack([results[p] for p in range(len(spec["sde_steps"]))]).transpose(1, 2)
    yield relative_error(ours, numbers["completion_x0"])


SECTIONS: dict[str, Callable[[Golden], Errors]] = {
    "schedules": schedules,
    "sde steps": sde_steps,
    "completion grids": completion_grids,
    "evaluation counts": evaluation_counts,
    "advantages": advantages,
    "loss and gradient": loss_and_gradient,
    "whole rollout": whole_rollout,
}


def check(folder: Path) -> dict[str, dict[str, float]]:
    """Largest relative error and number of comparisons of every section."""
    golden = Golden.read(folder)
    report = {}
    for name, section in SECTIONS.items():
        errors = list(section(golden))
        report[name] = {"max_relative_error": max(errors), "comparisons": len(errors)}
    return report


def main() -> int:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="laid out like tests/golden")
    options = parser.parse_args()
    try:
        report = check(options.folder)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        print(f"{options.folder}: cannot be checked: {type(error).__name__}: {error}")
        return 2
    for name, row in report.items():
        verdict = "ok" if row["max_relative_error"] <= TOLERANCE else "TOO LARGE"
        print(
            f"{name:<18} {row['max_relative_error']:.2e}  over {row['comparisons']:>3} "
            f"comparisons  {verdict}"
        )
    measuring.write_json(options.json, report)
    passed = all(row["max_relative_error"] <= TOLERANCE for row in report.values())
    print("passed" if passed else f"failed: a relative error is beyond {TOLERANCE:g}")
    return 0 if passed else 1


if __name__ == "__main__":
    program.run(main)
