"""The families of models that this system knows, found by what a model folder says of itself."""

import json
from pathlib import Path
from typing import Any

from g2rpo_ray.config import Config
from g2rpo_ray.models.family import Family, ModelFolderError
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.latents import LatentShape

FAMILIES: tuple[type[Family], ...] = (Flux1,)


def family_class(folder: Path) -> type[Family]:
    """Of a folder in diffusers' layout.

    Raises:
        ModelFolderError: its model_index.json is not readable, or is of no family known here.
    """
    index = folder / "model_index.json"
    name = read_json(index).get("_class_name")
    for family in FAMILIES:
        if family.pipeline == name:
            return family
    raise ModelFolderError(
        f"{index}: _class_name is {name!r}; families of models known here: "
        f"{', '.join(family.pipeline for family in FAMILIES)}"
    )


def open_family(folder: Path) -> Family:
    """The family of a folder, with the folder's configurations.

    Raises:
        ModelFolderError: as of ``family_class``; a configuration is not readable, or does not fit
            the others.
    """
    cls = family_class(folder)
    files = {part: folder / part / "config.json" for part in ("transformer", "vae")}
    files["model_index"] = folder / "model_index.json"
    optional = {
        "scheduler": folder / "scheduler" / "scheduler_config.json",
        "call": folder / "call.json",
    }
    files |= {name: file for name, file in optional.items() if file.is_file()}
    family = cls({name: read_json(file) for name, file in files.items()})
    if problem := family.problem(folder):
        raise ModelFolderError(problem)
    return family


def latents_of(config: Config, family: Family) -> LatentShape:
    """Of a picture of ``config.sampling``.

    Raises:
        ModelFolderError: the model has no pictures of such a size.
    """
    for section in ("sampling", "evaluation"):
        for side in ("height", "width"):
            pixels = getattr(getattr(config, section), side)
            if pixels is not None and pixels % family.multiple_of:
                raise ModelFolderError(
                    f"{section}.{side} is {pixels}; it must be a multiple of {family.multiple_of} "
                    f"(a {family.pipeline} packs so many pixels into a token)"
                )
    return family.latents(config.sampling.height, config.sampling.width)


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        ModelFolderError: the file is not readable, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFolderError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path}: expected a JSON object")
    return content
