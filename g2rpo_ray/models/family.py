"""What one family of models is: all that the rest of this system asks of it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.imports import uncollected
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.latents import LatentShape, unpacked

GuidanceKind = Literal["cfg", "embedded", "none"]
"""``cfg``: a second pass on a negative prompt (classifier-free guidance); ``embedded``: the scale
is an input of the network; ``none``: distilled, it takes no scale."""


class ModelFolderError(InputError):
    """A model folder is missing, incomplete or does not fit; the message names part and cause."""


@dataclass(frozen=True)
class Published:
    """A model of a family on the hub."""

    repo: str
    revision: str | None
    """Commit; none as in the catalogue."""
    terms: str
    """What must be accepted before the hub gives it out; empty where nothing must."""
    licence: Mapping[str, str]
    """As the hub reads it at the head of a model card."""
    text_parameters: int
    """Of the text encoders that a token passes: without tables of embeddings and picture towers."""
    configs: dict[str, dict[str, Any]]
    """As ``Family.configs``, so that a run can be planned before the model is there."""


def read_published(family_file: str) -> dict[str, Published]:
    """From ``published.json`` beside a family's file: by the name of the folder that a model is
    downloaded to."""
    file = Path(family_file).with_name("published.json")
    return {name: Published(**entry) for name, entry in json.loads(file.read_text()).items()}


def of_qkv(layers: str) -> tuple[str, ...]:
    """Names of three layers: ``*`` is q, k and v."""
    return tuple(layers.replace("*", part) for part in "qkv")


class Family(ABC):
    """One family, for one model folder. It holds no weights: networks are given to it."""

    pipeline: ClassVar[str]
    """Class of diffusers' pipeline, by which model_index.json names the family."""
    parts: ClassVar[Mapping[str, str]]
    """Parts that a folder must have, and their classes in diffusers or transformers."""
    blocks: ClassVar[tuple[str, ...]]
    """Classes of the transformer's repeated blocks, which are compiled and rounded to float8."""
    cut_by: ClassVar[str] = "tokenizer"
    """Part whose tokens ``prompts.max_sequence_length`` counts."""
    text_varies: ClassVar[bool] = False
    """Whether conditioning keeps each text's own length, so that compiled code meets many."""
    recordable: ClassVar[bool] = False
    """Whether a pass of the network was seen on a card to work as a CUDA graph."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Endings of the names of modules that get an adapter, where the run names none."""
    joined: ClassVar[Mapping[str, tuple[str, ...]]]
    """Layers of the network as its authors have it, which ComfyUI and kohya's tools keep: by name,
    with {} for a block's number, the layers of diffusers that each joins, in order."""
    in_sd_scripts: ClassVar[bool] = False
    """Whether kohya's sd-scripts trains and merges adapters of the family."""
    multiple_of: ClassVar[int] = 16
    """Pixels: a picture's height and width are multiples of it."""
    token_side: ClassVar[int] = 2
    """A token here is so many latents high and wide; the VAE shrinks pictures by 8."""
    has_kernels: ClassVar[bool] = False
    """Whether there is a ``fused.py`` beside ``family.py``."""
    published: ClassVar[Mapping[str, Published]]
    """See ``read_published``."""
    scheduler: ClassVar[str] = "FlowMatchEulerDiscreteScheduler"
    """Class of the folder's scheduler, of diffusers."""
    unguided: ClassVar[float] = 1.0
    """Guidance scale up to which the conditional pass stands alone."""

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
        with uncollected():
            import diffusers

            return getattr(diffusers, self.pipeline)

    def pipeline_arguments(self, guidance: float, negative_prompt: str = "") -> dict[str, Any]:
        """How diffusers' pipeline is told the guidance, as keyword arguments."""
        negative = {"negative_prompt": negative_prompt} if self.passes(guidance) == 2 else {}
        return {"guidance_scale": guidance} | negative

    @property
    @abstractmethod
    def guidance_kind(self) -> GuidanceKind:
        """What this folder's network makes of a guidance scale."""

    def passes(self, guidance: float) -> int:
        """Passes of the network in one evaluation: 2 with classifier-free guidance."""
        return 2 if self.guidance_kind == "cfg" and guidance > self.unguided else 1

    @staticmethod
    def guided(positive: Tensor, negative: Tensor, guidance: float) -> Tensor:
        """Classifier-free guidance of both passes' velocities (arXiv 2207.12598), as most pipelines
        count it: 1 is the conditional pass alone."""
        return negative + guidance * (positive - negative)

    def guidance_problem(self, guidance: float, negative_prompt: str) -> str | None:
        """Why ``sampling.guidance`` and ``negative_prompt`` do not fit this folder's model."""
        if self.guidance_kind == "none" and guidance > self.unguided:
            return (
                f"sampling.guidance is {guidance:g}, and this {self.pipeline} was distilled to "
                f"take none; set sampling.guidance: {self.unguided:g}"
            )
        if negative_prompt and self.passes(guidance) == 1:
            why = (
                f"guidance {guidance:g} is the conditional pass alone; use more than "
                f"{self.unguided:g}, or leave it out"
                if self.guidance_kind == "cfg"
                else f"this {self.pipeline} is not guided by one; leave it out"
            )
            return f"sampling.negative_prompt is {negative_prompt!r:.80}, and {why}"
        return None

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """The folder's own, which its schedule is made from.

        Raises:
            ModelFolderError: there is none, or it is empty.
        """
        if not self.configs.get("scheduler"):
            raise ModelFolderError(
                "sampling.schedule is dynamic, and model.path has no scheduler/"
                "scheduler_config.json, or an empty one: copy it from the published folder, or use "
                "sampling.schedule: static"
            )
        return self.configs["scheduler"]

    def problem(self, folder: Path) -> str | None:  # noqa: ARG002
        """Why the parts of ``folder`` do not fit each other or cannot be trained, if so."""
        return None

    @property
    def longest_text(self) -> int | None:
        """Largest ``prompts.max_sequence_length`` that pipeline and network take; None: any."""
        return None

    @property
    def vae_channels(self) -> int:
        """Of a latent; what a file leaves out has diffusers' default."""
        return self.configs["vae"].get("latent_channels", 4)

    def channels_problem(self, folder: Path, taken: int, predicted: int) -> str | None:
        """Why a transformer cannot be trained on the VAE's latents, if it cannot.

        Args:
            taken: channels of a token that the transformer takes.
            predicted: and that it predicts.
        """
        latent = self.vae_channels
        packed = self.token_side**2 * latent
        if taken == predicted == packed:
            return None
        packing = f", packed {packed // latent} x {latent} = {packed}" if packed != latent else ""
        return (
            f"{folder}/transformer/config.json: the transformer takes in_channels {taken} and "
            f"predicts out_channels {predicted}; {folder}/vae/config.json has latent_channels "
            f"{latent}{packing}. All three must be equal: a {self.pipeline} with further inputs "
            "(Fill, Control) or another model's VAE cannot be trained here"
        )

    def latents(self, height: int, width: int, frames: int = 1) -> LatentShape:
        """Of a picture, or of a video's frames, by their size in pixels.

        Tokens are those of diffusers' pipeline or, where it holds latents unpacked, their places
        in its order, with the channels last.

        Raises:
            ModelFolderError: the model has no pictures of such a size.
        """
        side = self.token_side
        channels = side**2 * self.vae_channels
        return LatentShape(height // (8 * side), width // (8 * side), channels, frames)

    def schedule(self, steps: int, latents: LatentShape) -> Tensor:
        """float32 ``[steps + 1]`` from 1 to 0: sigmas as the folder's own scheduler has them."""
        return self.own_schedule(steps, tokens=self.tokens(latents))

    def tokens(self, latents: LatentShape) -> int:
        """In which the network takes a picture: each is 2 x 2 latents."""
        return latents.packed[0] * self.token_side**2 // 4

    def own_schedule(
        self, steps: int, *, tokens: int = 0, mu: float | None = None, even: bool = True
    ) -> Tensor:
        """``schedule`` by diffusers' scheduler and the folder's ``scheduler_config.json``.

        Args:
            tokens: in which the network takes the picture; a dynamic shift is linear in them.
            mu: a dynamic shift of another form instead.
            even: from 1 to 1 / steps before the shift, as most pipelines ask for; not leaves the
                sigmas to the scheduler.

        Raises:
            ModelFolderError: as of ``scheduler_config``, or it gives no sigmas from 1 to 0.
        """
        try:
            sigmas = self._sigmas(steps, tokens, mu, even)
        # Whatever a value that the library did not expect makes it raise.
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._no_schedule(f"{type(error).__name__}: {error}") from error
        # diffusers' float32 rounds the first for some shifts, to above 1 too: no place for an SDE.
        if (1 - sigmas[0]).abs() < 1e-6:
            sigmas[0] = 1.0
        if sigmas[0] != 1 or sigmas[-1] != 0 or not (sigmas.diff() < 0).all():
            raise self._no_schedule(f"sigmas {', '.join(f'{s:.3g}' for s in sigmas[:4])} ...")
        return sigmas

    def _sigmas(self, steps: int, tokens: int, mu: float | None, even: bool) -> Tensor:
        import diffusers

        scheduler = getattr(diffusers, self.scheduler).from_config(self.scheduler_config)
        c = scheduler.config
        if mu is None and c.use_dynamic_shifting:
            slope = (c.max_shift - c.base_shift) / (c.max_image_seq_len - c.base_image_seq_len)
            mu = c.base_shift + slope * (tokens - c.base_image_seq_len)
        sigmas = np.linspace(1.0, 1 / steps, steps) if even else None
        scheduler.set_timesteps(steps, mu=mu, sigmas=sigmas)
        schedule: Tensor = scheduler.sigmas
        return schedule

    @staticmethod
    def _no_schedule(found: str) -> ModelFolderError:
        return ModelFolderError(
            "sampling.schedule is dynamic, and scheduler/scheduler_config.json of model.path gives "
            f"no schedule from 1 down to 0 ({found}): copy it again from the published folder, or "
            "use sampling.schedule: static"
        )

    @abstractmethod
    def encode(self, pipeline: Any, text: str, length: int) -> Conditioning:
        """By the pipeline's own ``encode_prompt``; its text encoders alone are loaded.

        Args:
            length: most tokens of the text (``prompts.max_sequence_length``).
        """

    def text_tokens(self, pipeline: Any, text: str) -> int:
        """Of a whole text with what the pipeline adds to it, as ``length`` of ``encode`` counts."""
        return len(getattr(pipeline, self.cut_by)(text).input_ids)

    @abstractmethod
    def blank(
        self, transformer: Any, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> Conditioning:
        """Zeros in the shapes that ``encode`` gives, for warming up and counting; see also
        ``Policy.blank``."""

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
        """``noise - x_0`` of every latent ``x`` at its ``sigma``, see ``Policy.forward``.

        Where ``passes(guidance)`` is 2 it is the guided one, of ``conditioning`` and its
        ``opposite``, in one batch where their shapes allow it.
        """

    def decode(self, vae: Any, x: Tensor, latents: LatentShape) -> Tensor:
        """float32 ``[B, tokens, channels]`` to pictures ``[B, 3, (frames,) H, W]`` in -1 to 1."""
        x = unpacked(x, latents, self.token_side) / vae.config.scaling_factor
        x = (x + vae.config.shift_factor).to(vae.dtype)
        return vae.decode(x.contiguous(memory_format=torch.channels_last), return_dict=False)[0]

    def is_modulation(self, name: str) -> bool:  # noqa: ARG002
        """Whether a block's linear layer runs once a sample, not once a token: float8 spares it."""
        return False

    def fuse(self, transformer: Any) -> None:
        """Put kernels of our own, without gradients, into a transformer on a card."""
        if self.has_kernels:
            # Needs Triton, which comes with PyTorch only where it is built for cards.
            import_module(".fused", type(self).__module__.rpartition(".")[0]).fuse(transformer)


def asked_tokens(pipeline: Any, text: str, *, enable_thinking: bool) -> int:
    """``Family.text_tokens`` of pipelines that put a text as a question to a chat model."""
    asked = pipeline.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=enable_thinking,
    )
    return len(pipeline.tokenizer(asked).input_ids)
