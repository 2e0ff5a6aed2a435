"""Measures the written assets as a user would find them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from tiny_world.autoencoder import decode, encode
from tiny_world.flux import caption_tokens, generate, load_flux
from tiny_world.pictures import PictureSource
from tiny_world.rewards import Reader, load_clip, load_hps, score
from tiny_world.world import World

Figures = dict[str, float]


def auc(scores: npt.NDArray[np.float32], right: npt.NDArray[np.bool_]) -> float:
    """How often a right picture scores above a wrong one; nan where one kind is missing."""
    good, bad = scores[right], scores[~right]
    if not len(good) or not len(bad):
        return float("nan")
    difference = good[:, None] - bad
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())


def by_attribute(won: Tensor, codes: Tensor, near: Tensor, names: Sequence[str]) -> Figures:
    """How often a picture scored higher under its own caption than under a near miss, for each
    attribute in which such pairs differ; those in which none does are left out.

    Args:
        won: bool [B].
        codes, near: int64 [B, attributes], of the captions and of the near misses.
        names: of the columns, some alike.
    """
    differs = codes != near
    figures = {}
    for name in dict.fromkeys(names):
        pairs = differs[:, [each == name for each in names]].any(dim=1)
        if pairs.any():
            figures[name] = float(won[pairs].float().mean())
    return figures


@torch.no_grad()
def measure_autoencoder(world: World, folder: Path, device: torch.device, pictures: int) -> Figures:
    """PSNR in dB, the oracle on reconstructions, mean and spread of normalised latents."""
    vae = AutoencoderKL.from_pretrained(folder / "vae").to(device).eval()
    source = PictureSource(device, 999, world)
    captions = source.captions(pictures)
    drawn = source.draw(captions)
    latents = torch.cat([encode(vae, part) for part in drawn.split(256)])
    decoded = torch.cat([decode(vae, part) for part in latents.split(256)])
    error = ((decoded.float() - drawn.float()) / 255).square().mean(dim=(1, 2, 3))
    names = [world.captions[i] for i in captions]
    check = world.check
    return {
        "vae_psnr_db": float((-10 * error.log10()).mean()),
        "vae_oracle": float(check(decoded.cpu().numpy(), names).mean()),
        "drawn_oracle": float(check(drawn.cpu().numpy(), names).mean()),
        "latent_mean": float(latents.mean()),
        "latent_std": float(latents.std()),
        "latent_channel_std_min": float(latents.std(dim=(0, 2, 3)).min()),
        "latent_channel_std_max": float(latents.std(dim=(0, 2, 3)).max()),
    }


def measure_flux(
    world: World, folder: Path, heldout: list[str], device: torch.device, rounds: int
) -> tuple[Figures, dict[int, npt.NDArray[np.uint8]]]:
    """The oracle on `rounds` generated pictures a held-out caption, at the world's step counts.

    Returns:
        The figures, and the pictures of each step count: a caption's rounds lie side by side.
    """
    model, vae = load_flux(folder, device)
    asked = [caption for caption in heldout for _ in range(rounds)]
    tokens = caption_tokens(folder, asked, device)
    figures: Figures = {"flux_pictures": len(asked)}
    pictures = {}
    for steps in world.steps:
        pictures[steps] = generate(model, vae, tokens, steps, seed=777).numpy()
        figures[f"flux_oracle_{steps}_steps"] = float(world.check(pictures[steps], asked).mean())
    return figures, pictures


def measure_rewards(
    world: World,
    assets: Path,
    heldout: list[str],
    generated: dict[int, npt.NDArray[np.uint8]],
    device: torch.device,
) -> Figures:
    """How well the reward models tell right from wrong, on drawn and on generated pictures.

    A generated picture is right where the oracle gives it more than half.
    """
    captions = world.captions
    rounds = len(generated[world.steps[0]]) // len(heldout)
    asked = [caption for caption in heldout for _ in range(rounds)]
    places = torch.tensor([captions.index(caption) for caption in asked])
    source = PictureSource(device, 998, world)
    families = source.families(1024, 2)
    drawn = source.draw(families[:, 0])
    figures: Figures = {}
    scores: dict[str, dict[int, npt.NDArray[np.float32]]] = {}
    for folder in sorted(path.parent for path in assets.glob("*/open_clip_config.json")):
        name = folder.name
        model = load_hps(folder, device) if name == "hps" else load_clip(folder, device)
        reader = Reader(world, folder, device)
        right = score(model, reader, drawn, families[:, 0])
        wrong = score(model, reader, drawn, families[:, 1])
        figures[f"{name}_near_miss_accuracy"] = float((right > wrong).float().mean())
        codes, near = world.codes[families].unbind(dim=1)
        for attribute, value in by_attribute(right > wrong, codes, near, world.attributes).items():
            figures[f"{name}_near_miss_accuracy_{attribute}"] = value
        figures[f"{name}_drawn_score"] = float(right.mean())
        scores[name] = {}
        for steps, pictures in generated.items():
            scores[name][steps] = score(model, reader, torch.from_numpy(pictures), places).numpy()
            figures[f"{name}_generated_score_{steps}_steps"] = float(scores[name][steps].mean())
    scores["sum"] = {
        steps: _standard(scores["clip"][steps]) + _standard(scores["hps"][steps])
        for steps in generated
    }
    for steps, pictures in generated.items():
        shown = (world.check(pictures, asked) > 0.5).reshape(-1, rounds)
        for name in scores:
            values = scores[name][steps].reshape(-1, rounds)
            figures[f"{name}_auc_{steps}_steps"] = auc(values.ravel(), shown.ravel())
            within = [auc(v, s) for v, s in zip(values, shown, strict=True)]
            figures[f"{name}_auc_within_captions_{steps}_steps"] = float(np.nanmean(within))
            chosen = shown[np.arange(len(values)), values.argmax(axis=1)]
            figures[f"{name}_best_of_{rounds}_oracle_{steps}_steps"] = float(chosen.mean())
    return figures


def _standard(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (values - values.mean()) / values.std()
