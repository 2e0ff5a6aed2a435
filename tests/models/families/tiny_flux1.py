"""A tiny FLUX.1-schnell of random weights; a tiny FLUX.1-dev, trained, is in the tiny world."""

import json
import shutil
from pathlib import Path

from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from g2rpo_ray.common.paths import resolve_path
from tests.models.families.parts import tiny_vae


def build_dev(folder: Path) -> None:
    """The tiny world's text encoders; one block of each kind."""
    _build(folder, guidance=True)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dynamic_shifting": True}))


def build_schnell(folder: Path) -> None:
    """Without an embedding of the guidance, and without a shift of the schedule."""
    _build(folder, guidance=False)
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")


def _build(folder: Path, *, guidance: bool) -> None:
    flux = resolve_path("tiny_world:flux")
    shutil.copytree(flux, folder, ignore=shutil.ignore_patterns("transformer", "vae"))
    tiny_vae(0.3611, 0.1159).save_pretrained(folder / "vae")
    config = json.loads((flux / "transformer" / "config.json").read_text())
    sizes = dict.fromkeys(("num_layers", "num_single_layers"), 1)
    sizes |= {"attention_head_dim": 16, "num_attention_heads": 2}
    config |= sizes | {"axes_dims_rope": (4, 6, 6), "guidance_embeds": guidance}
    FluxTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
