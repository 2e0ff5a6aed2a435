"""Train the models of the tiny world from a seed and write them in their real file layouts.

    python scripts/build_tiny_world.py --out g2rpo_ray/tiny_world/assets --seed 0 --device cuda

takes a few minutes on one H100 and hours on a CPU, so the assets are shipped. Architectures and
tokenizers are read from the shipped files; weights are trained from nothing. `--quick` runs a few
steps of each stage to show that everything works.
"""

import argparse
import datetime
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from pydantic import TypeAdapter

import measuring
from g2rpo_ray.tiny_world.scene import split_captions
from tiny_world.autoencoder import AutoencoderEffort, train_autoencoder
from tiny_world.flux import FluxEffort, load_flux, train_flux
from tiny_world.measure import Figures, measure_autoencoder, measure_flux, measure_rewards
from tiny_world.rewards import Painters, RewardEffort, train_clip, train_hps

SIZE_LIMIT_MB = 16.0
README = Path(__file__).parent / "tiny_world" / "assets_readme.md"
"""What the assets' README is made from."""
EFFORTS = Path(__file__).parent / "tiny_world" / "efforts.yaml"


@dataclass(frozen=True)
class Effort:
    """How long each stage trains, and how many pictures the figures rest on."""

    vae: AutoencoderEffort
    flux: FluxEffort
    clip: RewardEffort
    hps: RewardEffort
    vae_pictures: int
    captions: int | None  # held-out ones to measure; none: all
    rounds: int  # generated pictures a held-out caption and step count


def main(arguments: list[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="assets folder")
    parser.add_argument("--seed", type=int, default=0, help="of all training (default 0)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is visible here; allowed: cpu")
    device = torch.device(options.device)
    seconds: dict[str, float] = {}
    figures: Figures = {}
    # TF32 suffices for training; what is measured should be what a CPU computes, too.
    torch.set_float32_matmul_precision("high")
    start_s = time.monotonic()
    efforts = yaml.safe_load(EFFORTS.read_text())
    effort = TypeAdapter(Effort).validate_python(efforts["quick" if options.quick else "full"])
    for stage, found in build(options.out, effort, device, options.seed):
        figures |= found
        seconds[stage] = round(time.monotonic() - start_s, 1)
        print(f"{stage}: {seconds[stage]} s")
        start_s = time.monotonic()
    for name, value in figures.items():
        print(f"{name:<32} {value:.4f}")
    result = {
        "seed": options.seed,
        "quick": options.quick,
        "trained_on": f"{measuring.card_name(device)} with torch {torch.__version__}",
        "seconds": seconds,
        "figures": figures,
        "sizes_mb": _sizes_mb(options.out),
    }
    (options.out / "README.md").write_text(_readme(options, result))
    measuring.write_json(options.json, result)
    total = sum(result["sizes_mb"].values())
    if total > SIZE_LIMIT_MB:
        sys.exit(f"{options.out} holds {total:.1f} MB; at most {SIZE_LIMIT_MB} MB may be shipped")


def build(
    out: Path, effort: Effort, device: torch.device, seed: int
) -> Iterator[tuple[str, Figures]]:
    """Each stage, when it is done, with its figures."""
    # The split is part of the world, not of a training run: it does not follow the seed.
    train, heldout = split_captions(seed=0)
    (out / "prompts").mkdir(parents=True, exist_ok=True)
    for name, captions in (("train", train), ("heldout", heldout)):
        (out / "prompts" / f"{name}.txt").write_text("\n".join(captions) + "\n")
    yield "prompts", {}
    flux = out / "flux"
    train_autoencoder(flux / "vae", effort.vae, device, seed)
    yield "vae", {}
    weak = train_flux(flux, effort.flux, device, seed)
    yield "flux", {}
    good, vae = load_flux(flux, device)
    painters = Painters(good, weak, vae)
    train_clip(out / "clip", painters, effort.clip, device, seed)
    yield "clip", {}
    train_hps(out / "hps", out / "clip", painters, effort.hps, device, seed + 1)
    yield "hps", {}
    torch.set_float32_matmul_precision("highest")
    figures = measure_autoencoder(flux, device, effort.vae_pictures)
    asked = heldout[: effort.captions]
    flux_figures, pictures = measure_flux(flux, asked, device, effort.rounds)
    yield "measure", figures | flux_figures | measure_rewards(out, asked, pictures, device)


def _sizes_mb(out: Path) -> dict[str, float]:
    """Megabytes (10^6 bytes) of each part of the assets."""
    parts = [part for part in sorted(out.iterdir()) if part.is_dir()]
    return {
        part.name: round(sum(f.stat().st_size for f in part.rglob("*") if f.is_file()) / 1e6, 2)
        for part in parts
    }


def _readme(options: argparse.Namespace, result: dict) -> str:
    command = ["python", "scripts/build_tiny_world.py", "--out", "DIR"]
    command += ["--seed", str(options.seed)]
    command += ["--device", "cpu" if result["trained_on"].startswith("CPU") else "cuda"]
    command += ["--quick"] if options.quick else []
    rows = [f"| {name} | {value:.4g} |" for name, value in result["figures"].items()]
    sizes = ", ".join(f"{name} {size} MB" for name, size in result["sizes_mb"].items())
    stages = ("vae", "flux", "clip", "hps")
    seconds = ", ".join(f"{name} {result['seconds'][name]}" for name in stages)
    return README.read_text().format(
        date=datetime.date.today().isoformat(),
        trained_on=result["trained_on"],
        command=shlex.join(command),
        figures="\n".join(rows),
        sizes=sizes,
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
