"""Versions of what a result depends on."""

import platform
from importlib.metadata import version

from g2rpo_ray import __version__

PACKAGES = ("ray", "torch", "diffusers", "transformers", "peft", "deepspeed",
            "open_clip_torch", "safetensors")  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    own = {"python": platform.python_version(), "g2rpo-ray": __version__}
    return own | {name: version(name) for name in PACKAGES}
