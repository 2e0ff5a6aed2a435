"""Check that this system draws with a model as diffusers' own pipeline does.

    python scripts/check_family.py FOLDER [--steps N --guidance S --height H --width W --seed S]

Both walk in float32 from the same noise, with the same text and the folder's own schedule. Prints
the largest relative error of the latents over all steps, and the largest difference of the
pictures; exit code 1 beyond the tolerance of 1e-4, 2 for a folder that cannot be read. Arguments of
the pipeline that the folder needs (tiny text encoders do) are ``common`` of its ``call.json``.
"""

import argparse
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import program
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import Family
from g2rpo_ray.models.loading import load_part
from g2rpo_ray.models.policy import Policy
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.models.vae import PictureDecoder
from g2rpo_ray.sampling.evaluator import Evaluator
from g2rpo_ray.sampling.sampler import Sampler

TOLERANCE = 1e-4
Walk = tuple[list[Tensor], Tensor]
"""A trajectory's latents, float32 ``[1, tokens, channels]``: noise, and after every step. And the
picture at its end, 0 to 255, ``[1, (frames,) H, W, 3]``."""


def by_diffusers(family: Family, folder: Path, options: argparse.Namespace) -> Walk:
    """The pipeline's walk, read at its scheduler."""
    latents: list[Tensor] = []
    pipeline = family.pipeline_class.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    step = pipeline.scheduler.step

    def recorded(velocity: Tensor, timestep: Tensor, x: Tensor, **more: Any) -> Any:
        if not latents:
            latents.append(_packed(x))
        result = step(velocity, timestep, x, **more)
        latents.append(_packed(result[0]))
        return result

    pipeline.scheduler.step = recorded
    (pictures, *_) = pipeline(
        prompt=options.prompt,
        height=options.height,
        width=options.width,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(options.seed),
        output_type="np",
        return_dict=False,
        **({"num_frames": options.frames} if options.frames > 1 else {}),
        **family.pipeline_arguments(options.guidance, options.negative_prompt),
        **_needed(family),
    )
    return latents, torch.from_numpy(pictures) * 255


def by_us(family: Family, folder: Path, options: argparse.Namespace, noise: Tensor) -> Walk:
    """The sampler's walk from the same noise."""
    model = ModelSection(path=str(folder), dtype="float32")
    call = inspect.signature(family.pipeline_class.__call__)
    default = call.parameters["max_sequence_length"].default
    length = _needed(family).get("max_sequence_length", default)
    negative = options.negative_prompt if family.passes(options.guidance) == 2 else None
    encoder = TextEncoder(model, length, negative=negative)
    shape = family.latents(options.height, options.width, options.frames)
    policy = Policy(family, load_part(model, "transformer", torch.float32), shape, options.guidance)
    sampler = Sampler(Evaluator(policy, 1), family.schedule(options.steps, shape))
    trajectory = sampler.trajectory(noise, encoder.encode(options.prompt))
    decoder = PictureDecoder(family, load_part(model, "vae", torch.float32), shape, 1)
    return [*trajectory.latents, trajectory.x0], decoder.decode(trajectory.x0).float()


def _needed(family: Family) -> dict[str, Any]:
    needed: dict[str, Any] = family.configs.get("call", {}).get("common", {})
    return needed


def _packed(x: Tensor) -> Tensor:
    """As ``LatentShape`` has it, where a pipeline holds ``[1, channels, (frames,) h, w]``."""
    return x.clone() if x.ndim == 3 else x.flatten(2).transpose(1, 2)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="in diffusers' layout; tiny_world:flux is in the package")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--guidance", type=float, default=3.5)
    parser.add_argument("--negative-prompt", default="", help="of classifier-free guidance")
    parser.add_argument("--height", type=int, default=64, help="pixels")
    parser.add_argument("--width", type=int, default=64, help="pixels")
    parser.add_argument("--frames", type=int, default=1, help="of a video")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--prompt", default="a red circle left of a green triangle")
    options = parser.parse_args(arguments)
    folder = resolve_path(options.folder)
    family = open_family(folder)
    expected, their_picture = by_diffusers(family, folder, options)
    latents, picture = by_us(family, folder, options, expected[0])
    pairs = zip(latents, expected, strict=True)
    # Not Python's max, which passes over NaN.
    error = float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())
    difference = float((picture - their_picture.round()).abs().max())
    print(f"{family.pipeline}, {options.steps} steps, {options.width}x{options.height}: ", end="")
    print(f"latents {error:.2e} relative, pictures {difference:.0f} of 255 apart at most")
    passed = error <= TOLERANCE
    print("passed" if passed else f"failed: the relative error is beyond {TOLERANCE:g}")
    return 0 if passed else 1


if __name__ == "__main__":
    program.run(main)
