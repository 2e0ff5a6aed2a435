"""The families of models that this system knows, found by what a model folder says of itself."""

from pathlib import Path

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.weight_files import refuse_quantiser
from g2rpo_ray.config import Config
from g2rpo_ray.models.family import Family, ModelFolderError
from g2rpo_ray.models.flux1.family import Flux1
from g2rpo_ray.models.flux2.family import Flux2, Flux2Klein
from g2rpo_ray.models.latents import LatentShape
from g2rpo_ray.models.qwen_image.family import QwenImage
from g2rpo_ray.models.sd3.family import Sd3
from g2rpo_ray.models.z_image.family import ZImage

FAMILIES: tuple[type[Family], ...] = (Flux1, Sd3, Flux2, Flux2Klein, QwenImage, ZImage)


def open_family(folder: Path) -> Family:
    """The family of a folder in diffusers' layout, which has all parts that the family needs.

    Raises:
        ModelFolderError: the folder is of no family known here; a part is missing or of another
            class, is quantised, or does not fit the others.
    """
    index_file = folder / "model_index.json"
    if not index_file.is_file():
        raise ModelFolderError(
            f"{folder}: no model_index.json; expected a folder in diffusers' layout, as "
            "DiffusionPipeline.save_pretrained writes it"
        )
    index = read_json_object(index_file, ModelFolderError)
    name = index.get("_class_name")
    cls = next((family for family in FAMILIES if family.pipeline == name), None)
    if cls is None:
        raise ModelFolderError(
            f"{index_file}: _class_name is {name!r}; families of models known here: "
            f"{', '.join(family.pipeline for family in FAMILIES)}"
        )
    _check_scheduler(folder, cls)
    for part, expected in cls.parts.items():
        is_tokenizer = part.startswith("tokenizer")
        file = folder / part / ("tokenizer_config.json" if is_tokenizer else "config.json")
        if not file.is_file():
            raise ModelFolderError(
                f"{folder}: part '{part}' is missing ({part}/{file.name} not found); "
                f"needed parts: {', '.join(cls.parts)}"
            )
        if is_tokenizer:
            continue
        entry = index.get(part)
        found = entry[-1] if isinstance(entry, list) and entry else None
        if found != expected:
            raise ModelFolderError(
                f"{index_file}: part '{part}' is a {found or 'missing entry'}; the {part} of a "
                f"{name} is a {expected}"
            )
        refuse_quantiser(file, ModelFolderError)
        _check_named(file, part, expected)
    configs = {"model_index": index}
    for name in ("transformer/config", "vae/config", "scheduler/scheduler_config", "call"):
        file = folder / f"{name}.json"
        if file.is_file():
            configs[name.partition("/")[0]] = read_json_object(file, ModelFolderError)
    family = cls(configs)
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
    family.latents(**config.deployment_size)
    return family.latents(config.sampling.height, config.sampling.width)


def check_settings(config: Config, family: Family) -> None:
    """
    Raises:
        ModelFolderError: guidance, negative prompt or length of texts do not fit the model, or the
            learner has no guidance to leave out.
    """
    sampling, length = config.sampling, config.prompts.max_sequence_length
    problem = family.guidance_problem(sampling.guidance, sampling.negative_prompt)
    if problem is None and config.learner.unguided and family.passes(sampling.guidance) == 1:
        problem = (
            f"learner.unguided is true, and an evaluation of this {family.pipeline} with "
            f"sampling.guidance {sampling.guidance:g} is one pass: there is no other to leave out; "
            "set learner.unguided: false"
        )
    if (most := family.longest_text) is not None and length > most:
        problem = (
            f"prompts.max_sequence_length is {length}; a {family.pipeline} takes 1 to {most} tokens"
        )
    if problem:
        raise ModelFolderError(f"model.path {config.model.path!r}: {problem}")


def negative_prompt(config: Config) -> str | None:
    """``sampling.negative_prompt``; None where guidance takes no second pass on it."""
    two = open_family(resolve_path(config.model.path)).passes(config.sampling.guidance) == 2
    return config.sampling.negative_prompt if two else None


def _check_scheduler(folder: Path, cls: type[Family]) -> None:
    file = folder / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        return
    found = read_json_object(file, ModelFolderError).get("_class_name", cls.scheduler)
    if found != cls.scheduler:
        raise ModelFolderError(
            f"{file}: _class_name is {found}; a {cls.pipeline} is trained on the flow of a "
            f"{cls.scheduler}: put the published folder's scheduler there"
        )


def _check_named(file: Path, part: str, expected: str) -> None:
    """A network's config.json says whose it is: defaults fill in what a file leaves out."""
    config = read_json_object(file, ModelFolderError)
    named = config.get("_class_name") or config.get("model_type")
    if named is None or (part in ("transformer", "vae") and named != expected):
        raise ModelFolderError(
            f"{file}: it is for a {named or 'nameless model'}, not for a {expected}; what such "
            "a file leaves out, a library would fill in by its defaults: copy it again"
        )
