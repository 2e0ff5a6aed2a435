#!/usr/bin/env python3
"""Make small models for the scorers that the tiny world does not ship, in their real file formats.

    python scripts/build_tiny_scorers.py --out scorers

takes minutes on a CPU, and prints the overrides with which ``g2rpo evaluate`` scores by them, too:

- PickScore: a transformers CLIPModel, half way between the weights of the tiny clip and hps;
- aesthetic: a linear head on the tiny clip, fitted to tell sound pictures from flawed ones;
- ImageReward: a BLIP trained on preferences between drawn pictures.
"""

import argparse
import json
from pathlib import Path

import torch

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict
from g2rpo_ray.rewards.scorers.open_clip_model import load_clip_features
from tiny_world.scorers import (
    CLIP,
    fit_aesthetic_head,
    scorer_options,
    to_transformers,
    train_image_reward,
    write_pickscore,
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of all training (0)")
    parser.add_argument("--steps", type=int, default=2000, help="of ImageReward's training (2000)")
    options = parser.parse_args(arguments)
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)

    clip, hps = (
        load_state_dict(resolve_path(f"tiny_world:{file}"))
        for file in ("clip/open_clip_model.safetensors", "hps/HPS_tiny.pt")
    )
    half_way = {name: (clip[name].float() + hps[name].float()) / 2 for name in clip}
    write_pickscore(out / "pickscore", to_transformers(half_way))

    features = load_clip_features(CLIP, None, "cpu", "float32")
    torch.save(fit_aesthetic_head(features, options.seed, 2048), out / "aesthetic.pth")

    right = train_image_reward(out / "image_reward", options.steps, 48, options.seed)
    print(f"image_reward: a new picture scores above a near miss in {right:.1%} of 512 pairs")
    for name, settings in scorer_options(out).items():
        reward = {"kind": name, "weight": 0, "cpus_per_replica": 0.1, "options": settings}
        print(f"'rewards.{name}={json.dumps(reward)}'")


if __name__ == "__main__":
    main()
