"""Train the models of the tiny world from a seed and write them in their real file layouts.

    python scripts/build_tiny_world.py --out g2rpo_ray/tiny_world/assets --seed 0 --device cuda
    python scripts/build_tiny_world.py --world hard --out runs/hard_world --device cuda

takes a few minutes on one H100 and hours on a CPU, so the tiny world's assets are shipped; those of
the harder one (``tiny_world/hard.py``), on which algorithms are compared, are not. Architectures
and tokenizers are read from the shipped files; weights are trained from nothing. A build that was
stopped goes on after its last whole stage. `--effort quick` runs a few steps of each stage to show
that everything works.
"""

import argparse
import datetime
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import yaml
from pydantic import TypeAdapter

import measuring
from tiny_world.autoencoder import AutoencoderEffort, train_autoencoder
from tiny_world.flux import FluxEffort, TinyFlux, load_flux, train_flux
from tiny_world.measure import Figures, measure_autoencoder, measure_flux, measure_rewards
from tiny_world.rewards import Painters, RewardEffort, TrainingPictures, train_clip, train_hps
from tiny_world.world import WORLDS, World, harder, prepare

SIZE_LIMIT_MB = {"tiny": 16.0, "hard": 40.0}
README = Path(__file__).parent / "tiny_world" / "assets_readme.md"
"""What the assets' README is made from."""
EFFORTS = Path(__file__).parent / "tiny_world" / "efforts.yaml"


@dataclass(frozen=True)
class Effort:
    """How long each stage trains, and how many pictures the figures rest on."""

    vae: AutoencoderEffort
    flux: FluxEffort
    bank: int  # pictures a caption that scorers are trained on, right and flawed each
    clip: RewardEffort
    hps: RewardEffort
    vae_pictures: int
    captions: int | None  # held-out ones to measure; none: all
    rounds: int  # generated pictures a held-out caption and step count


def main(arguments: list[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--world", choices=tuple(WORLDS), default="tiny")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="assets folder")
    parser.add_argument("--seed", type=int, default=0, help="of all training (default 0)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument(
        "--effort", choices=("full", "trial", "quick"), default="full", help="see efforts.yaml"
    )
    parser.add_argument("--limit-s", type=float, default=0.0, help="start no stage after this")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is visible here; allowed: cpu")
    device = torch.device(options.device)
    # TF32 suffices for training; what is measured should be what a CPU computes, too.
    torch.set_float32_matmul_precision("high")
    # As in load_policy: with torch 2.11, cuDNN's attention goes wrong in backward passes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    efforts = yaml.safe_load(EFFORTS.read_text())
    name = ("" if options.world == "tiny" else "hard_") + options.effort
    effort = TypeAdapter(Effort).validate_python(efforts[name])
    build = Build(WORLDS[options.world](), options.out, effort, device, options.seed)
    if not build.run(options.limit_s):
        sys.exit(f"stopped by --limit-s; the same command goes on in {options.out}")
    seconds, figures = build.seconds, build.figures
    for name, value in figures.items():
        print(f"{name:<32} {value:.4f}")
    result = {
        "seed": options.seed,
        "effort": options.effort,
        "trained_on": f"{measuring.card_name(device)} with torch {torch.__version__}",
        "seconds": seconds,
        "figures": figures,
        "sizes_mb": _sizes_mb(options.out),
    }
    if options.world == "tiny":
        (options.out / "README.md").write_text(_readme(options, result))
    measuring.write_json(options.json, result)
    total = sum(result["sizes_mb"].values())
    limit = SIZE_LIMIT_MB[options.world]
    if total > limit:
        sys.exit(
            f"{options.out} holds {total:.1f} MB; at most {limit} MB may be shipped or carried"
        )


class Build:
    """The stages, each of which leaves files and its figures."""

    def __init__(
        self, world: World, out: Path, effort: Effort, device: torch.device, seed: int
    ) -> None:
        self.world, self.out, self.effort = world, out, effort
        self.device, self.seed = device, seed
        self.seconds: dict[str, float] = {}
        self.figures: Figures = {}
        self.work = out.with_name(out.name + ".work")
        """What later stages need, and nobody else."""

    def run(self, limit_s: float) -> bool:
        """Do what is not done yet; False where time ended before."""
        stages: dict[str, Callable[[], Figures | None]] = {
            "prompts": lambda: prepare(self.world, self.out),
            "vae": self._vae,
            "flux": self._flux,
            "clip": lambda: self._clip("clip", self.pictures),
            "hps": self._hps,
        }
        if self.world.name == "hard":
            stages |= {
                "other_network": lambda: self._clip("other_network", self.pictures),
                "other_data": self._other_data,
            }
        stages["measure"] = self._measure
        self.work.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        for name, stage in stages.items():
            note = self.work / f"{name}.json"
            if not note.exists():
                if limit_s and time.monotonic() - started_s > limit_s:
                    return False
                seconds, figures = measuring.timed(stage)
                measuring.write_json(note, [round(seconds, 1), figures or {}])
            self.seconds[name], figures = json.loads(note.read_text())
            self.figures |= figures
            print(f"{name}: {self.seconds[name]} s")
        shutil.rmtree(self.work)
        return True

    def _vae(self) -> None:
        train_autoencoder(
            self.world, self.out / "flux" / "vae", self.effort.vae, self.device, self.seed
        )

    def _flux(self) -> None:
        flux = self.out / "flux"
        weak = train_flux(self.world, flux, self.effort.flux, self.device, self.seed)
        torch.save(weak.state_dict(), self.work / "weak.pt")

    @cached_property
    def pictures(self) -> TrainingPictures:
        flux = self.out / "flux"
        good, vae = load_flux(flux, self.device)
        weak = TinyFlux(flux)
        weak.load_state_dict(torch.load(self.work / "weak.pt", weights_only=True))
        painters = Painters(good, weak.to(self.device).eval(), vae, flux)
        return TrainingPictures(self.world, painters, self.device, self.effort.bank, self.seed)

    def _clip(self, name: str, pictures: TrainingPictures) -> None:
        train_clip(self.out / name, pictures, self.effort.clip, self.device, self.seed)

    def _hps(self) -> None:
        folders = self.out / "hps", self.out / "clip"
        train_hps(*folders, self.pictures, self.effort.hps, self.device, self.seed + 1)

    def _other_data(self) -> None:
        other = TrainingPictures(harder(1), self.pictures.painters, self.device, 1, self.seed + 2)
        self._clip("other_data", other)

    def _measure(self) -> Figures:
        torch.set_float32_matmul_precision("highest")
        flux, effort = self.out / "flux", self.effort
        figures = measure_autoencoder(self.world, flux, self.device, effort.vae_pictures)
        asked = self.world.heldout[: effort.captions]
        of_flux, pictures = measure_flux(self.world, flux, asked, self.device, effort.rounds)
        of_rewards = measure_rewards(self.world, self.out, asked, pictures, self.device)
        return figures | of_flux | of_rewards


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
    command += ["--effort", options.effort] if options.effort != "full" else []
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
