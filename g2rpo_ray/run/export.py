"""A run's weights in the formats of diffusers and others, read back and compared, with a card."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor, nn

from g2rpo_ray import __version__
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import check_room, flush, is_locked, sole_writer, writing
from g2rpo_ray.common.formatting import format_score
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.secrets import publishable
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo
from g2rpo_ray.models.adapters import PEFT_CONFIG, PEFT_FILE
from g2rpo_ray.models.catalogue import CATALOGUE
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.formats import Format, check_format, named_for, peft_settings
from g2rpo_ray.models.loading import DTYPES, check_model, load_part, on_meta
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.rounding import Arrived, Rounding, rounded
from g2rpo_ray.models.saving import (
    ADAPTER_FILE,
    adapter_tensors,
    merge_adapters,
    save_adapter,
    save_named,
    save_transformer,
)
from g2rpo_ray.models.weights import load_weights, trainable_parameters
from g2rpo_ray.run.paths import check_outside_states, run_folder
from g2rpo_ray.run.scores import heldout_before_after
from g2rpo_ray.run.weights import read_fitting_info, while_it_is_there, wide_weights_in

logger = logging.getLogger(__name__)

Form = Literal["adapter", "merged", "full"]
Layout = Format | Literal["merged"]
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"


class ExportError(InputError):
    """The weights cannot be exported as asked; the message says why, and nothing was changed."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    form: Form
    dtype: torch.dtype
    arrived: Arrived
    rounded_base: str = ""
    """What is to be known where it was trained beside a base in 8 bits; else empty."""


def export(
    config: Config,
    folder: Path,
    checkpoint: str = "last",
    *,
    layout: Layout = "diffusers",
    average: bool = False,
    rounding: Rounding = "nearest",
    max_shard_size: str = "10GB",
) -> Exported:
    """Write ``folder``, which must not be there yet: whole or not at all; always on the CPU.

    A LoRA run gives its adapter (``pytorch_lora_weights.safetensors``), or ``merged`` the whole
    transformer; full fine-tuning gives the transformer (``config.json``,
    ``diffusion_pytorch_model*.safetensors``). A warning is logged where much of what was trained
    is lost in rounding.

    Args:
        checkpoint: ``last``, ``best``, or the folder of a checkpoint.
        layout: whose names an adapter has, or ``merged`` into the transformer. All weights are in
            diffusers' layout alone.
        average: the moving average of the weights (``learner.ema_decay``) instead of the last.
        rounding: to ``model.dtype``, as the run computed with them, or by chance (from the run's
            seed); ``none`` writes float32.
        max_shard_size: of a transformer's file.

    Raises:
        ExportError: the base model, or a transformer in another layout, was asked for, or the
            folder is there already, lies among checkpoints, or cannot be written.
        CheckpointError: the checkpoint is damaged.
        RunFolderError: its weights are of another kind or base model than the configuration's.
        ModelFolderError: the layout has no names for the family, or for an adapted layer; what was
            read back differs from what was written.
        DiskError: the disk is full or read-only, or has no room for it.
    """
    check_model(config)
    form = _form(config, checkpoint, layout)
    target = folder.expanduser().absolute()
    check_outside_states(target, ExportError, "--to")
    if target.exists():
        raise ExportError(f"{target} is there already; name another folder")
    if form != "adapter":
        check_room(target, _transformer_bytes(config, rounding), "the transformer")

    def read(path: Path) -> tuple[CheckpointInfo, dict[str, Tensor]]:
        return read_fitting_info(path, config.model), wide_weights_in(config, path, average)

    # At once, and of one moment: a running run deletes old checkpoints.
    source, (info, weights) = while_it_is_there(config, checkpoint, read)
    with _written_whole(target) as temporary:
        if layout != "merged" and form == "adapter":
            arrived = _write_adapter(config, weights, rounding, temporary, layout)
        else:
            transformer, arrived = _transformer(config, weights, rounding)
            save_transformer(transformer, temporary, max_shard_size)
        exported = Exported(form, _dtype(config, rounding), arrived, _rounded_base(config, form))
        # Scores are of the run's own weights, as they were after an iteration.
        own = not average or config.draws_average
        own = own and source.resolve().is_relative_to(run_folder(config).resolve())
        own = own and not (form == "merged" and arrived.is_lost)
        model_card(config, info, exported, own, layout).save(temporary / "README.md")
    if arrived.is_lost:
        logger.warning("%s", _warning(exported))
    return exported


def _form(config: Config, checkpoint: str, layout: Layout) -> Form:
    if layout == "merged" and config.model.lora is None:
        raise ExportError("--merged is for LoRA runs; this run trains all weights")
    if layout not in ("diffusers", "merged") and config.model.lora is None:
        raise ExportError(
            f"--format {layout} is for adapters, and this run trains all weights: leave it out for "
            "the transformer in diffusers' format"
        )
    if checkpoint == "base":
        raise ExportError(
            f"--checkpoint base: that is model.path itself ({config.model.path}); allowed: last, "
            "best, or the folder of a checkpoint"
        )
    if config.model.lora is None:
        return "full"
    if layout == "merged":
        return "merged"
    check_format(open_family(resolve_path(config.model.path)), layout)
    return "adapter"


@contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` to write to, which becomes it at the end, or is gone."""
    temporary = target.with_name(f".{target.name}.writing")
    for other in sorted(target.parent.glob(".*.writing")):
        if other != temporary and not is_locked(other):
            logger.warning("%s: left by an export that was killed; remove it", other)
    with writing(target, ExportError):
        temporary.mkdir(parents=True, exist_ok=True)
        with sole_writer(temporary, ExportError, "--to"):
            try:
                for left_over in temporary.iterdir():
                    left_over.unlink()
                yield temporary
                for file in temporary.iterdir():
                    # safetensors lets the owner alone read what it writes; this is to be handed on.
                    shutil.copymode(temporary / "README.md", file)
                    flush(file)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)


def _dtype(config: Config, rounding: Rounding) -> torch.dtype:
    return torch.float32 if rounding == "none" else DTYPES[config.model.dtype]


def _write_adapter(
    config: Config, weights: dict[str, Tensor], rounding: Rounding, folder: Path, layout: Format
) -> Arrived:
    assert config.model.lora is not None
    arrived, tensors = Arrived(), adapter_tensors(weights, config.model.lora)
    for name, meant in tensors.items():
        tensors[name] = rounded(meant, _dtype(config, rounding), rounding, config.seed, name)
        arrived.add(torch.zeros_like(meant), meant, tensors[name])
    family = open_family(resolve_path(config.model.path))
    if layout == "diffusers":
        save_adapter(tensors, family, folder)
        return arrived
    named = named_for(layout, tensors, on_meta(family, "transformer"), family)
    save_named(named, folder / (PEFT_FILE if layout == "peft" else ADAPTER_FILE))
    if layout == "peft":
        (folder / PEFT_CONFIG).write_text(json.dumps(peft_settings(named), indent=2) + "\n")
    return arrived


def _transformer_bytes(config: Config, rounding: Rounding) -> int:
    transformer = on_meta(open_family(resolve_path(config.model.path)), "transformer")
    return sum(p.numel() for p in transformer.parameters()) * _dtype(config, rounding).itemsize


def _transformer(
    config: Config, weights: dict[str, Tensor], rounding: Rounding
) -> tuple[nn.Module, Arrived]:
    """The whole transformer, and what is left in it of the update from the base model's weights."""
    # First as the run had it, whatever precision the files have.
    if config.model.lora is not None:
        base = config.model.model_copy(update={"frozen_dtype": None})
        transformer = load_part(base, "transformer", DTYPES[config.model.dtype])
        if rounding == "none":
            transformer.float()
        arrived = merge_adapters(transformer, weights, config.model.lora, rounding, config.seed)
        return transformer, arrived
    policy, arrived = load_policy(config), Arrived()
    if rounding == "none":
        policy.transformer.float()
    for name, before in trainable_parameters(policy).items():
        if (meant := weights.get(name)) is not None:
            # In its place: the float32 ones of a large model go one by one.
            weights[name] = rounded(meant, before.dtype, rounding, config.seed, name)
            arrived.add(before.detach(), meant, weights[name])
    load_weights(policy, weights)
    return policy.transformer, arrived


def _rounded_base(config: Config, form: Form) -> str:
    model = config.model
    if model.frozen_dtype is None:
        return ""
    place = "merged into" if form == "merged" else "made for"
    return (
        f"Trained beside {model.path} in {model.frozen_dtype} (model.frozen_dtype), as the run "
        f"drew and scored it; {place} the model in {model.dtype}, whose pictures differ slightly."
    )


def _warning(exported: Exported) -> str:
    how = (
        "export the adapter itself (without --merged), which loses nothing; "
        if exported.form == "merged"
        else "the run drew and was judged with weights rounded to the nearest, too; "
    )
    return (
        f"warning: {1 - exported.arrived.share:.0%} of the trained update was lost when the "
        f"weights were rounded to {exported.dtype}: {how}--rounding none writes float32, which is "
        f"rounded like this again where it is loaded in {exported.dtype}; --rounding stochastic "
        "keeps the update on average, under noise that may be longer than it is"
    )


def model_card(
    config: Config,
    info: CheckpointInfo,
    exported: Exported,
    own: bool = True,
    layout: Layout = "diffusers",
) -> ModelCard:
    """What it is, how to load it, how it was made, and what it scored; the hub reads its head.

    Args:
        own: whether the run's evaluation at that iteration is of these very weights.
        layout: whose names an adapter has.
    """
    scores = heldout_before_after(run_folder(config), info.iteration) if own else {}
    rewards = [f"{n} (weight {r.weight:g})" for n, r in config.trained_rewards.items()]
    recipe = publishable(config.model_dump(mode="json", exclude_defaults=True))
    family = open_family(resolve_path(config.model.path))
    sampling = config.sampling
    arguments = family.pipeline_arguments(sampling.guidance, sampling.negative_prompt)
    return ModelCard.from_template(
        _card_data(config, exported.form),
        template_path=str(TEMPLATE),
        name=Path(config.run_dir).name,
        config=config,
        size=config.deployment_size,
        pipeline=family.pipeline,
        transformer=family.parts["transformer"],
        guidance=", ".join(f"{name}={value!r}" for name, value in arguments.items()),
        info=info,
        form=exported.form,
        arrived=exported.arrived,
        rounded_base=exported.rounded_base,
        modules=info.trained.partition("full, of ")[2],
        dtype=exported.dtype,
        adapter_file=PEFT_FILE if layout == "peft" else ADAPTER_FILE,
        layout=layout,
        version=__version__,
        rewards=", ".join(rewards),
        scores={} if all(s["after"] is None for s in scores.values()) else scores,
        score=format_score,
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).strip(),
    )


def _card_data(config: Config, form: Form) -> ModelCardData:
    # A folder that the catalogue does not know may have any name: the hub would not find it.
    base = CATALOGUE.get(Path(config.model.path).name)
    data = ModelCardData(
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["g2rpo", "reinforcement-learning", *(["lora"] if form == "adapter" else [])],
    )
    if base is not None:
        data["base_model"] = base.repo
        data["base_model_relation"] = "adapter" if form == "adapter" else "finetune"
        for key, value in base.licence.items():
            data[key] = value
    return data
