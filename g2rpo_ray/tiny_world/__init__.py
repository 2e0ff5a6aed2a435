"""A small world in which RL progress is real and checkable, without a download.

`scene` draws pictures of two coloured shapes and names them in words; `oracle` checks by program
whether a picture shows its caption. `assets/` holds small models of the real classes in the real
file layouts, trained on this world by `scripts/build_tiny_world.py`: a FLUX folder, a CLIP and an
HPS reward model, and prompts. `assets/README.md` has their measured figures. `assets/words/` is a
second world, of short words, which PP-OCR judges.
"""

from pathlib import Path


def assets_dir() -> Path:
    """The folder with `flux/`, `clip/`, `hps/`, `prompts/` and `words/`, absolute."""
    return Path(__file__).resolve().parent / "assets"
