"""Train the models of the tiny world from a seed and write them in their real file layouts.

    python scripts/build_tiny_world.py --out g2rpo_ray/tiny_world/assets --seed 0 --device cuda
    python scripts/build_tiny_world.py --world words --out g2rpo_ray/tiny_world/assets/words ...
    python scripts/build_tiny_world.py --world hard --out runs/hard_world --device cuda

takes a few minutes on one H100 and hours on a CPU, so the assets of the tiny world and of the words
(``tiny_world/words.py``) are shipped; those of the harder one (``tiny_world/hard.py``), on which
algorithms are compared, are not. Architectures and tokenizers are read from the shipped files;
weights are trained from nothing. A build that was stopped goes on where it was a minute before, one
that paused where it was: it ends with 3.
`--only` makes some stages, so that several may be made side by side (``hard_world.py`` does).
`--effort quick` runs a few steps of each stage to show that everything works.
"""

import argparse
import datetime
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import yaml
from pydantic import TypeAdapter

import measuring
import program
from tiny_world.autoencoder import AutoencoderEffort, train_autoencoder
from tiny_world.fitting import Paused, Session
from tiny_world.flux import FluxEffort, train_flux
from tiny_world.hard import HELDOUT, SCENE_SEED, TRAIN
from tiny_world.measure import Figures, measure_autoencoder, measure_flux, measure_rewards
from tiny_world.rewards import Painters, RewardEffort, TrainingPictures, train_clip, train_hps
from tiny_world.world import World, harder, prepare, spelt, tiny

SIZE_LIMIT_MB = {"tiny": 16.0, "hard": 40.0, "words": 6.0}
EFFORTS = Path(__file__).parent / "tiny_world" / "efforts.yaml"
NEVER_TRAINED_ON = ("other_network", "other_data")
"""Scorers of the harder world alone."""
STAGES = ("prompts", "vae", "flux", "clip", "hps", *NEVER_TRAINED_ON, "measure")


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
    scenes: tuple[int, int] = (TRAIN, HELDOUT)  # of the harder world

    def world(self, name: str, seed: int = SCENE_SEED) -> World:
        if name == "hard":
            return harder(seed, *self.scenes)
        return tiny() if name == "tiny" else spelt()


def main(arguments: list[str] | None = None) -> int:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--world", choices=tuple(SIZE_LIMIT_MB), default="tiny")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="assets folder")
    parser.add_argument("--seed", type=int, default=0, help="of all training (default 0)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument(
        "--effort", choices=("full", "trial", "quick"), default="full", help="see efforts.yaml"
    )
    parser.add_argument("--limit-s", type=float, default=0.0, help="pause after this")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=str(STAGES))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is visible here; allowed: cpu")
    device = torch.device(options.device)
    # TF32 suffices for training; what is measured should be what a CPU computes, too.
    torch.set_float32_matmul_precision("high")
    # As in load_policy: with torch 2.11, cuDNN's attention goes wrong in backward passes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    efforts = yaml.safe_load(EFFORTS.read_text())
    name = ("" if options.world == "tiny" else f"{options.world}_") + options.effort
    effort = TypeAdapter(Effort).validate_python(efforts[name])
    build = Build(effort.world(options.world), options.out, effort, device, options.seed)
    if not build.run(options.limit_s, options.only or STAGES):
        print(f"{', '.join(build.missing)}: not done; the same command goes on in {options.out}")
        return 3
    if build.missing:
        return 0
    build.end()
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
    if options.world != "hard":
        (options.out / "README.md").write_text(_readme(options, result))
    measuring.write_json(options.json, result)
    total = sum(result["sizes_mb"].values())
    limit = SIZE_LIMIT_MB[options.world]
    if total > limit:
        sys.exit(
            f"{options.out} holds {total:.1f} MB; at most {limit} MB may be shipped or carried"
        )
    return 0


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

    @property
    def stages(self) -> dict[str, Callable[[Session], Figures | None]]:
        every: dict[str, Callable[[Session], Figures | None]] = {
            "prompts": lambda _: prepare(self.world, self.out),
            "vae": self._vae,
            "flux": self._flux,
            "clip": lambda session: self._clip("clip", self.pictures, session),
            "hps": self._hps,
            "other_network": lambda session: self._clip("other_network", self.pictures, session),
            "other_data": self._other_data,
            "measure": lambda _: self._measure(),
        }
        unmade = {"tiny": NEVER_TRAINED_ON, "words": ("clip", "hps", *NEVER_TRAINED_ON)}
        left_out = unmade.get(self.world.name, ())
        return {name: stage for name, stage in every.items() if name not in left_out}

    @property
    def missing(self) -> list[str]:
        """Stages that are not done."""
        return [name for name in self.stages if not self._note(name).exists()]

    def _note(self, stage: str) -> Path:
        return self.work / f"{stage}.json"

    def run(self, limit_s: float, only: Sequence[str]) -> bool:
        """Do what is not done yet of some stages; False where time ended before."""
        self.work.mkdir(parents=True, exist_ok=True)
        until_s = time.monotonic() + (limit_s or math.inf)
        session = Session(self.device, self.seed, self.work, until_s)
        for name in self.missing:
            if name not in only:
                continue
            if time.monotonic() > until_s:
                return False
            spent = self.work / f"{name}.spent"
            before_s = float(spent.read_text()) if spent.exists() else 0.0
            started_s = time.monotonic()
            try:
                figures = self.stages[name](session)
            except Paused as paused:
                print(paused)
                return False
            finally:
                seconds = before_s + time.monotonic() - started_s
                spent.write_text(f"{seconds:.1f}")
            measuring.write_json(self._note(name), [round(seconds, 1), figures or {}])
            # Of no use any more, and larger than all that is made.
            (self.work / f"{name}.pt").unlink(missing_ok=True)
            print(f"{name}: {seconds:.1f} s")
        return True

    def end(self) -> None:
        """Take the figures together, and leave nothing beside what was made."""
        for name in self.stages:
            self.seconds[name], figures = json.loads(self._note(name).read_text())
            self.figures |= figures
        shutil.rmtree(self.work)

    def _vae(self, session: Session) -> None:
        train_autoencoder(self.world, self.out / "flux" / "vae", self.effort.vae, session)

    def _flux(self, session: Session) -> None:
        weak = train_flux(self.world, self.out / "flux", self.effort.flux, session)
        torch.save(weak.state_dict(), self.work / "weak.weights")

    @cached_property
    def painters(self) -> Painters:
        return Painters(self.out / "flux", self.work / "weak.weights", self.device)

    @cached_property
    def pictures(self) -> TrainingPictures:
        return TrainingPictures(self.world, self.painters, self.effort.bank, self.seed)

    def _clip(self, name: str, pictures: TrainingPictures, session: Session) -> None:
        train_clip(self.out / name, pictures, self.effort.clip, session)

    def _hps(self, session: Session) -> None:
        folders = self.out / "hps", self.out / "clip"
        session = replace(session, seed=self.seed + 1)
        train_hps(*folders, self.pictures, self.effort.hps, session)

    def _other_data(self, session: Session) -> None:
        # One picture a caption: no painter is asked, so FLUX need not be there.
        other = TrainingPictures(self.effort.world("hard", 1), self.painters, 1, self.seed + 2)
        self._clip("other_data", other, session)

    def _measure(self) -> Figures:
        torch.set_float32_matmul_precision("highest")
        flux, effort = self.out / "flux", self.effort
        figures = measure_autoencoder(self.world, flux, self.device, effort.vae_pictures)
        asked = self.world.heldout[: effort.captions]
        of_flux, pictures = measure_flux(self.world, flux, asked, self.device, effort.rounds)
        if self.world.name == "words":
            return figures | of_flux
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
    command += ["--world", "words"] if options.world == "words" else []
    command += ["--seed", str(options.seed)]
    command += ["--device", "cpu" if result["trained_on"].startswith("CPU") else "cuda"]
    command += ["--effort", options.effort] if options.effort != "full" else []
    rows = [f"| {name} | {value:.4g} |" for name, value in result["figures"].items()]
    sizes = ", ".join(f"{name} {size} MB" for name, size in result["sizes_mb"].items())
    stages = (name for name in STAGES[1:-1] if name in result["seconds"])
    seconds = ", ".join(f"{name} {result['seconds'][name]}" for name in stages)
    # What the assets' README is made from.
    kind = "assets" if options.world == "tiny" else options.world
    template = EFFORTS.with_name(f"{kind}_readme.md")
    return template.read_text().format(
        date=datetime.date.today().isoformat(),
        trained_on=result["trained_on"],
        command=shlex.join(command),
        figures="\n".join(rows),
        sizes=sizes,
        seconds=seconds,
    )


if __name__ == "__main__":
    program.run(main)
