"""A tiny folder of every family, made from a seed when a test first asks for it."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from g2rpo_ray.config import Config, config_from_dict
from tests.models.families import tiny_flux1, tiny_flux2, tiny_qwen_image, tiny_sd3, tiny_z_image
from tests.tiny import ALONE, tiny_config


@dataclass(frozen=True)
class Tiny:
    """How to make a folder, and how its model is guided."""

    build: Callable[[Path], None]
    """Writes a folder in diffusers' layout, with random weights."""
    guidances: tuple[tuple[float, str], ...]
    """Guidance scale and negative prompt; the first is the model's usual one."""


TINY = {
    "flux1_dev": Tiny(tiny_flux1.build_dev, ((3.5, ""), (1.0, ""))),
    "flux1_schnell": Tiny(tiny_flux1.build_schnell, ((1.0, ""), (0.0, ""))),
    "flux2_dev": Tiny(tiny_flux2.build_dev, ((4.0, ""), (1.0, ""))),
    "flux2_klein": Tiny(tiny_flux2.build_klein, ((4.0, ""), (1.0, ""))),
    "flux2_klein_distilled": Tiny(tiny_flux2.build_klein_distilled, ((1.0, ""),)),
    "qwen_image": Tiny(tiny_qwen_image.build, ((4.0, "a blue square"), (1.0, ""))),
    "sd3": Tiny(tiny_sd3.build, ((4.5, "a blue square"), (1.0, ""))),
    "z_image": Tiny(tiny_z_image.build, ((4.0, "a blue square"), (0.0, ""))),
}
GUIDED = [(name, *guidance) for name, tiny in TINY.items() for guidance in tiny.guidances]


@lru_cache
def tiny_folder(name: str) -> Path:
    """Of this process; nobody may change it."""
    root = Path(tempfile.mkdtemp(prefix=f"g2rpo_{name}_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        TINY[name].build(root / name)
    return root / name


def family_config(
    name: str, *overrides: str, run_dir: Path = Path("unused"), negative_prompt: str | None = None
) -> Config:
    """Small settings for a tiny folder with its usual guidance, in float32, on its own schedule."""
    guidance, usual = TINY[name].guidances[0]
    tree = tiny_config(
        run_dir,
        f"model.path={tiny_folder(name)}",
        "model.dtype=float32",
        f"sampling.guidance={guidance}",
        "sampling.schedule=dynamic",
        *overrides,
    ).model_dump()
    tree["sampling"]["negative_prompt"] = usual if negative_prompt is None else negative_prompt
    tree["rewards"] = {"clip": tree["rewards"]["clip"] | ALONE}
    return config_from_dict(tree, source="test")
