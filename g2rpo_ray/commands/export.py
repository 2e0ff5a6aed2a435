"""``g2rpo export``: a run's weights in diffusers' formats, read back and compared, with a card."""

import shutil
from pathlib import Path
from typing import Literal

import yaml

from g2rpo_ray import __version__
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.learner.checkpoints.files import CheckpointInfo, read_weights
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import Family
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
from g2rpo_ray.run.folder import checkpoint_named, heldout_before_after, read_fitting_info

Form = Literal["adapter", "merged", "full"]
MAX_SHARD_SIZE = "10GB"


class ExportError(InputError):
    """The weights cannot be exported as asked; the message says why, and nothing was changed."""


def export(
    config: Config,
    *,
    checkpoint: str,
    folder: Path,
    merge: bool = False,
    average: bool = False,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> Form:
    """Write ``folder``, which must not be there yet: whole or not at all.

    A LoRA run gives its adapter (``pytorch_lora_weights.safetensors``), or with ``merge`` the
    whole transformer; full fine-tuning gives the transformer (``config.json``,
    ``diffusion_pytorch_model*.safetensors``). The tensors are of ``model.dtype``, as the run
    computed with them.

    Args:
        checkpoint: ``last``, ``best``, or the folder of a checkpoint.
        average: the moving average of the weights (``learner.ema_decay``) instead of the last.

    Raises:
        ExportError: the base model was asked for, or the folder is there already or cannot be
            written.
        CheckpointError: the checkpoint is damaged.
        RunFolderError: its weights are of another kind or base model than the configuration's.
        ModelFolderError: what was read back differs from what was written.
    """
    check_model(config)
    if merge and config.model.lora is None:
        raise ExportError("--merged is for LoRA runs; this run trains all weights")
    if checkpoint == "base":
        raise ExportError(
            f"--checkpoint base: that is model.path itself ({config.model.path}); allowed: last, "
            "best, or the folder of a checkpoint"
        )
    target = folder.expanduser().absolute()
    if target.exists():
        raise ExportError(f"{target} is there already; name another folder")
    source = checkpoint_named(config, checkpoint)
    info = read_fitting_info(source, config.model)
    form: Form = "full" if config.model.lora is None else "merged" if merge else "adapter"
    write = _write_adapter if form == "adapter" else _write_transformer
    temporary = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(config, source, temporary, average, max_shard_size)
        card = model_card(config, info, form)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        for file in temporary.iterdir():
            # safetensors lets the owner alone read what it writes; an export is to be handed on.
            shutil.copymode(temporary / "README.md", file)
        temporary.rename(target)
    except OSError as error:
        raise ExportError(f"{target}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return form


def _write_adapter(
    config: Config, source: Path, folder: Path, average: bool, _max_shard_size: str
) -> None:
    assert config.model.lora is not None
    dtype = DTYPES[config.model.dtype]
    tensors = adapter_tensors(read_weights(source, average), config.model.lora)
    family = open_family(resolve_path(config.model.path))
    save_adapter({name: tensor.to(dtype) for name, tensor in tensors.items()}, family, folder)


def _write_transformer(
    config: Config, source: Path, folder: Path, average: bool, max_shard_size: str
) -> None:
    if config.model.lora is not None:
        transformer = load_part(config.model, "transformer", DTYPES[config.model.dtype])
        merge_adapters(transformer, read_weights(source, average), config.model.lora)
    else:
        policy = load_policy(config)
        load_weights(policy, read_weights(source, average))
        transformer = policy.transformer
    save_transformer(transformer, folder, max_shard_size)


def model_card(config: Config, info: CheckpointInfo, form: Form) -> str:
    """Markdown: what it is, how to load it, how it was made, and what it scored."""
    sampling = config.sampling
    rewards = ", ".join(f"{n} (weight {r.weight:g})" for n, r in config.trained_rewards.items())
    family = open_family(resolve_path(config.model.path))
    arguments = family.pipeline_arguments(sampling.guidance)
    guidance = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    recipe = config.model_dump(mode="json", exclude_defaults=True)
    return f"""# {Path(config.run_dir).name}: {config.model.path} trained with {config.algorithm}

{_what(form, info)}

## Use

```python
{_usage(config, family, form)}
picture = pipeline(
    "a cat", height={sampling.height}, width={sampling.width},
    num_inference_steps={config.evaluation.steps}, {guidance},
    max_sequence_length={config.prompts.max_sequence_length},
).images[0]
```

The base model's licence applies to these weights.

## How it was made

- {info.iteration} iterations of {sampling.prompts_per_iteration} prompts x {sampling.members}
  members, {info.updates} optimizer updates, seed {info.seed}, g2rpo-ray {__version__}
- trained rewards: {rewards}
- training prompts: `{config.prompts.train}`; held-out prompts: `{config.prompts.heldout}`

## Scores on held-out prompts

{_scores(config)}

## Recipe

```yaml
{yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).strip()}
```
"""


def _what(form: Form, info: CheckpointInfo) -> str:
    if form == "adapter":
        return f"A LoRA adapter (`{ADAPTER_FILE}`), trained as {info.trained}."
    if form == "merged":
        return f"A transformer with its adapters merged in ({info.trained})."
    _, _, modules = info.trained.partition("full, of ")
    which = f"of whose weights those of {modules}" if modules else "all of whose weights"
    return f"A transformer, {which} were trained."


def _usage(config: Config, family: Family, form: Form) -> str:
    pipeline, dtype = family.pipeline, f"torch.{config.model.dtype}"
    base = f'"{config.model.path}", torch_dtype={dtype}'
    names, scheduler = [pipeline], ""
    # With the dynamic schedule, the folder's own scheduler is the right one already.
    if config.sampling.schedule == "static":
        name = "FlowMatchEulerDiscreteScheduler"
        names.append(name)
        scheduler = f"\npipeline.scheduler = {name}(shift={config.sampling.shift:g})"
    if form == "adapter":
        load = f"pipeline = {pipeline}.from_pretrained({base})\n"
        load += 'pipeline.load_lora_weights("this folder")'
    else:
        transformer = family.parts["transformer"]
        names.append(transformer)
        load = f"transformer = {transformer}.from_pretrained(\n"
        load += f'    "this folder", torch_dtype={dtype}\n)\n'
        load += f"pipeline = {pipeline}.from_pretrained(\n    {base}, transformer=transformer\n)"
    imports = f"import torch\nfrom diffusers import {', '.join(sorted(names))}\n\n"
    return imports + load + scheduler


def _scores(config: Config) -> str:
    rows = ["| reward | before | at the end of the run |", "|---|---|---|"]
    scores = heldout_before_after(Path(config.run_dir).expanduser().absolute())
    if not scores:
        return "None: the run has no evaluation."
    for name, values in scores.items():
        before, after = (
            "–" if value is None else f"{value:.4f}"
            for value in (values["before"], values["after"])
        )
        trained = "" if name in config.trained_rewards else " (not trained on)"
        rows.append(f"| {name}{trained} | {before} | {after} |")
    return "\n".join(rows)
