"""The policy, and the texts that it is trained on."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from g2rpo_ray.common.section import Gpus, Section


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(64, ge=1)
    """Rank of every adapter."""
    alpha: float = Field(128.0, gt=0)
    """Adapter scale is alpha / rank."""
    target_modules: list[str] | None = None
    """Module name endings that get an adapter; none means those of the model's family (FLUX.1:
    every attention and feed-forward projection of the repeated blocks)."""


class ModelSection(Section):
    """The policy: a transformer with its VAE and text encoders."""

    path: str = Field(min_length=1)
    """Folder in diffusers' layout (model_index.json, transformer/, vae/, text_encoder/, ...).
    ``tiny_world:flux`` is the small model inside this package."""
    variant: str | None = Field(None, pattern=r"^[\w-]+$")
    """Copy of the weights to read, by the word in its files' names: ``fp16``, ``bf16``, ``ema``.
    Parts that have no such files give their plain ones; none reads the plain ones of every part."""
    random_weights: bool = False
    """For benchmarks: transformer and VAE have the architecture of the folder's ``config.json`` and
    random weights, made on the device; no weight file of theirs is read."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the network computes in; latents and log-probabilities are float32 always."""
    lora: LoraSection | None = None
    """Train adapters of this shape; none trains all weights of the transformer."""
    trained_modules: list[str] | None = Field(None, min_length=1)
    """Train all weights of these parts of the transformer alone, by their names' components, e.g.
    ``single_transformer_blocks``, ``transformer_blocks.0`` or ``attn.to_q``; not with ``lora``."""
    gradient_checkpointing: bool = False
    """Recompute activations in the learner's backward pass: less memory, about a third slower."""
    share_frozen: Literal["auto"] | bool = "auto"
    """With ``lora``: the roles on a card map one copy of the model's own weights. ``auto`` where
    two of them can be on one card; ``true`` everywhere, on each node's CPU as well; ``false``
    never. Where a system does not allow it each role loads its own, and says so."""
    frozen_dtype: Literal["float8"] | None = None
    """With ``lora``: how the linear layers of the transformer's blocks are stored; none is
    ``dtype``. ``float8`` takes half of bfloat16's memory: e4m3 with a scale for each output
    channel, widened to ``dtype`` for every product, by rollout, learner, evaluation and samples
    alike. It changes the function that is trained on: docs/plan.md has the price."""
    deterministic: bool = False
    """Rollout workers, ranks, encoders and scorers (of ``g2rpo score``, too) compute the same bits
    in every run on the same kind of card, to compare two runs: no compiled kernel is chosen by its
    time, and backward passes add in one order. The CPU needs no such thing. Scorers that ask a
    server (``judge``, ``unified_reward``, ``http``) get what that server computes."""
    truncate_timesteps: bool = False
    """Truncate sigma * 1000 to an integer as published code does; diffusers' pipeline does not."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lora is not None and self.trained_modules is not None:
            raise ValueError(
                "lora and trained_modules are both set; adapters are chosen by lora.target_modules"
            )
        if self.share_frozen is True and self.lora is None:
            raise ValueError(
                "share_frozen is true and lora is not set: weights that are trained cannot be "
                "shared; set lora, or share_frozen: auto"
            )
        if self.frozen_dtype is not None and self.lora is None:
            raise ValueError(
                f"frozen_dtype is {self.frozen_dtype} and lora is not set: weights that are "
                "trained are not kept in 8 bits; set lora, or leave frozen_dtype out"
            )
        return self


class PromptsSection(Section):
    """Texts to train on and to judge by."""

    train: str = Field(min_length=1)
    """UTF-8 text with a prompt a line, JSON, a table, parquet, a folder of a Hugging Face dataset,
    or what ``g2rpo embed`` wrote. ``tiny_world:prompts/train.txt`` is in this package."""
    heldout: str = Field(min_length=1)
    """Prompts for evaluation only, same formats."""
    key: str | Annotated[int, Field(ge=1)] = "prompt"
    """Key or column with the text, in formats that have one; a number is a column, from 1, of a
    table whose rows have no names."""
    encoder_gpus: Gpus = 0.0
    """GPUs (or a fraction) for encoding prompts on the fly; 0 encodes on the CPU. Prompts that were
    embedded before need no encoder."""
    encoder_threads: int | None = Field(None, ge=1)
    """Threads of the encoder on the CPU, and of each worker of ``g2rpo embed``; embeddings depend
    on it in the last bit. none: ``rollout.threads``."""
    max_sequence_length: int = Field(512, ge=1)
    """Most tokens of a text; some models' text encoders fill it up."""
    max_characters: int = Field(2000, ge=1)
    """A longer prompt is refused: it is most often a broken file."""
