"""A run's weights in diffusers' formats, read back and compared, with a card."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import yaml
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor, nn

from g2rpo_ray import __version__
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.formatting import format_score
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.format import CheckpointInfo, read_weights
from g2rpo_ray.models.catalogue import CATALOGUE
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.loading import DTYPES, check_model, load_part
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.saving import (
    ADAPTER_FILE,
    adapter_tensors,
    merge_adapters,
    save_adapter,
    save_transformer,
)
from g2rpo_ray.models.weights import load_weights
from g2rpo_ray.run.paths import run_folder
from g2rpo_ray.run.scores import heldout_before_after
from g2rpo_ray.run.weights import checkpoint_named, read_fitting_info

Form = Literal["adapter", "merged", "full"]
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"


class ExportError(InputError):
    """The weights cannot be exported as asked; the message says why, and nothing was changed."""


def export(
    config: Config,
    folder: Path,
    checkpoint: str = "last",
    *,
    merge: bool = False,
    average: bool = False,
    max_shard_size: str = "10GB",
) -> Form:
    """Write ``folder``, which must not be there yet: whole or not at all; always on the CPU.

    A LoRA run gives its adapter (``pytorch_lora_weights.safetensors``), or with ``merge`` the
    whole transformer; full fine-tuning gives the transformer (``config.json``,
    ``diffusion_pytorch_model*.safetensors``). The tensors are of ``model.dtype``, as the run
    computed with them.

    Args:
        checkpoint: ``last``, ``best``, or the folder of a checkpoint.
        average: the moving average of the weights (``learner.ema_decay``) instead of the last.
        max_shard_size: of a transformer's file.

    Raises:
        ExportError: the base model was asked for, or the folder is there already or cannot be
            written.
        CheckpointError: the checkpoint is damaged.
        RunFolderError: its weights are of another kind or base model than the configuration's.
        ModelFolderError: what was read back differs from what was written.
    """
    check_model(config)
    form = _form(config, checkpoint, merge)
    target = folder.expanduser().absolute()
    if target.exists():
        raise ExportError(f"{target} is there already; name another folder")
    source = checkpoint_named(config, checkpoint)
    info = read_fitting_info(source, config.model)
    with _written_whole(target) as temporary:
        weights = read_weights(source, average)
        if form == "adapter":
            _write_adapter(config, weights, temporary)
        else:
            save_transformer(_transformer(config, weights), temporary, max_shard_size)
        # Scores are of the run's own weights, as they were after an iteration.
        own = not average and source.resolve().is_relative_to(run_folder(config).resolve())
        model_card(config, info, form, own).save(temporary / "README.md")
    return form


def _form(config: Config, checkpoint: str, merge: bool) -> Form:
    if merge and config.model.lora is None:
        raise ExportError("--merged is for LoRA runs; this run trains all weights")
    if checkpoint == "base":
        raise ExportError(
            f"--checkpoint base: that is model.path itself ({config.model.path}); allowed: last, "
            "best, or the folder of a checkpoint"
        )
    if config.model.lora is None:
        return "full"
    return "merged" if merge else "adapter"


@contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` to write to, which becomes it at the end, or is gone."""
    temporary = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            # safetensors lets the owner alone read what it writes; an export is to be handed on.
            shutil.copymode(temporary / "README.md", file)
        temporary.rename(target)
    except OSError as error:
        raise ExportError(f"{target}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_adapter(config: Config, weights: dict[str, Tensor], folder: Path) -> None:
    assert config.model.lora is not None
    dtype = DTYPES[config.model.dtype]
    tensors = adapter_tensors(weights, config.model.lora)
    family = open_family(resolve_path(config.model.path))
    save_adapter({name: tensor.to(dtype) for name, tensor in tensors.items()}, family, folder)


def _transformer(config: Config, weights: dict[str, Tensor]) -> nn.Module:
    if config.model.lora is not None:
        transformer = load_part(config.model, "transformer", DTYPES[config.model.dtype])
        merge_adapters(transformer, weights, config.model.lora)
        return transformer
    policy = load_policy(config)
    load_weights(policy, weights)
    return policy.transformer


def model_card(config: Config, info: CheckpointInfo, form: Form, own: bool = True) -> ModelCard:
    """What it is, how to load it, how it was made, and what it scored; the hub reads its head.

    Args:
        own: whether the run's evaluation at that iteration is of these very weights.
    """
    scores = heldout_before_after(run_folder(config), info.iteration) if own else {}
    rewards = [f"{n} (weight {r.weight:g})" for n, r in config.trained_rewards.items()]
    recipe = config.model_dump(mode="json", exclude_defaults=True)
    family = open_family(resolve_path(config.model.path))
    sampling = config.sampling
    arguments = family.pipeline_arguments(sampling.guidance, sampling.negative_prompt)
    return ModelCard.from_template(
        _card_data(config, form),
        template_path=str(TEMPLATE),
        name=Path(config.run_dir).name,
        config=config,
        pipeline=family.pipeline,
        transformer=family.parts["transformer"],
        guidance=", ".join(f"{name}={value!r}" for name, value in arguments.items()),
        info=info,
        form=form,
        modules=info.trained.partition("full, of ")[2],
        dtype=f"torch.{config.model.dtype}",
        adapter_file=ADAPTER_FILE,
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
