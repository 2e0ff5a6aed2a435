"""What one family of models is: all that the rest of this system asks of it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from torch import Tensor

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.latents import LatentShape


class ModelFolderError(InputError):
    """A model folder is missing, incomplete or does not fit; the message names part and cause."""


@dataclass(frozen=True)
class Published:
    """A model of a family on the hub."""

    repo: str
    revision: str
    """Commit."""
    terms: str
    """What must be accepted before the hub gives it out."""
    licence: Mapping[str, str]
    """As the hub reads it at the head of a model card."""
    configs: dict[str, dict[str, Any]]
    """As ``Family.configs``, so that a run can be planned before the model is there."""


def read_published(family_file: str) -> dict[str, Published]:
    """From ``published.json`` beside a family's file: by the name of the folder that a model is
    downloaded to."""
    file = Path(family_file).with_name("published.json")
    return {name: Published(**entry) for name, entry in json.loads(file.read_text()).items()}


class Family(ABC):
    """One family, for one model folder. It holds no weights: networks are given to it."""

    pipeline: ClassVar[str]
    """Class of diffusers' pipeline, by which model_index.json names the family."""
    parts: ClassVar[Mapping[str, str]]
    """Parts that a folder must have, and their classes in diffusers or transformers."""
    blocks: ClassVar[tuple[str, ...]]
    """Classes of the transformer's repeated blocks, which are compiled and rounded to float8."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Endings of the names of modules that get an adapter, where the run names none."""
    multiple_of: ClassVar[int]
    """Pixels: a picture's height and width are multiples of it."""
    published: ClassVar[Mapping[str, Published]]
    """See ``read_published``."""

    def __init__(self, configs: dict[str, dict[str, Any]]) -> None:
        """
        Args:
            configs: the folder's JSON files: ``model_index``, those of ``transformer``, ``vae``
                and, where they are there, of ``scheduler`` and ``call`` (``call.json``).
        """
        self.configs = configs

    @property
    def encoder_parts(self) -> list[str]:
        """Parts that make a prompt's conditioning."""
        return [part for part in self.parts if part not in ("transformer", "vae")]

    @property
    def pipeline_class(self) -> Any:
        """Of diffusers."""
        return getattr(diffusers, self.pipeline)

    def pipeline_arguments(self, guidance: float) -> dict[str, Any]:
        """How diffusers' pipeline is told the guidance, as keyword arguments."""
        return {"guidance_scale": guidance}

    def passes(self, guidance: float) -> int:  # noqa: ARG002
        """Passes of the network in one evaluation: 2 with classifier-free guidance."""
        return 1

    def problem(self, folder: Path) -> str | None:  # noqa: ARG002
        """Why the parts of ``folder`` do not fit each other or cannot be trained, if so."""
        return None

    @abstractmethod
    def latents(self, height: int, width: int, frames: int = 1) -> LatentShape:
        """Of a picture, or of a video's frames, by their size in pixels.

        Tokens are those of diffusers' pipeline or, where it holds latents unpacked, their places
        in its order, with the channels last.
        """

    @abstractmethod
    def schedule(self, steps: int, latents: LatentShape) -> Tensor:
        """float32 ``[steps + 1]`` from 1 to 0: sigmas as the folder's own scheduler has them."""

    @abstractmethod
    def encode(self, pipeline: Any, text: str, length: int) -> Conditioning:
        """By the pipeline's own ``encode_prompt``; its text encoders alone are loaded.

        Args:
            length: most tokens of the text (``prompts.max_sequence_length``).
        """

    @abstractmethod
    def blank(
        self, transformer: Any, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> Conditioning:
        """Zeros in the shapes that ``encode`` gives, for warming up and counting."""

    @abstractmethod
    def velocity(
        self,
        transformer: Any,
        x: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        guidance: float,
        latents: LatentShape,
    ) -> Tensor:
        """``noise - x_0`` of every latent ``x`` at its ``sigma``, see ``Policy.forward``; with
        classifier-free guidance in as many ``passes`` as that needs."""

    @abstractmethod
    def decode(self, vae: Any, x: Tensor, latents: LatentShape) -> Tensor:
        """float32 ``[B, tokens, channels]`` to pictures ``[B, 3, (frames,) H, W]`` in -1 to 1."""

    def is_modulation(self, name: str) -> bool:  # noqa: ARG002
        """Whether a block's linear layer runs once a sample, not once a token: float8 spares it."""
        return False

    def fuse(self, transformer: Any) -> None:  # noqa: B027  (many families have none)
        """Put kernels of our own, without gradients, into a transformer on a card."""

    def width(self, transformer: Any) -> int:
        """Channels of the hidden states."""
        return transformer.config.num_attention_heads * transformer.config.attention_head_dim

    def tokens(self, latents: LatentShape, length: int) -> int:
        """Tokens of picture and text that the blocks see."""
        return latents.packed[0] + length
