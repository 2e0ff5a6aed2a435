"""An open_clip model as a text-image similarity, shared by the ``hps`` and ``clip`` scorers."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo_ray.config import resolve_path
from g2rpo_ray.rewards.scorer import ScorerError

CACHED_PROMPTS = 4096
LOCAL_DIR = "local-dir:"


def resolve_architecture(architecture: str) -> str:
    """An open_clip model name as open_clip wants it, with the folder of ``local-dir:`` resolved.

    Raises:
        ScorerError: no such folder, its configuration is missing, or the name is unknown.
    """
    import open_clip

    if not architecture.startswith(LOCAL_DIR):
        if architecture not in open_clip.list_models():
            raise ScorerError(
                f"open_clip knows no model {architecture!r}; give one of its names (ViT-H-14, ...) "
                f"or {LOCAL_DIR}FOLDER with an open_clip_config.json"
            )
        return architecture
    folder = resolve_path(architecture.removeprefix(LOCAL_DIR))
    # Without the file open_clip would go on with a default, and with other preprocessing.
    if not (folder / "open_clip_config.json").is_file():
        raise ScorerError(f"{folder}: no open_clip_config.json in it (or no such folder)")
    return f"{LOCAL_DIR}{folder}"


class ClipSimilarity:
    """Cosine of normalised image and text features."""

    def __init__(self, model: Any, tokenizer: Any, preprocess: Callable[[Tensor], Tensor]) -> None:
        """
        Args:
            model: an open_clip model on its device, in evaluation mode.
            tokenizer: of the same model.
            preprocess: uint8 ``[B, H, W, 3]`` on the CPU -> what the image tower takes.
        """
        self._model, self._tokenizer, self._preprocess = model, tokenizer, preprocess
        self._device = next(model.parameters()).device
        self._text_features = lru_cache(CACHED_PROMPTS)(self._encode_text)

    @torch.inference_mode()
    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """uint8 ``[B, H, W, 3]`` and B texts -> float32 ``[B]`` on the CPU."""
        text_features = torch.stack([self._text_features(prompt) for prompt in prompts]).cpu()
        return (self.image_features(pictures) * text_features).sum(dim=-1)

    @torch.inference_mode()
    def image_features(self, pictures: Tensor) -> Tensor:
        """uint8 ``[B, H, W, 3]`` -> normalised float32 ``[B, features]`` on the CPU."""
        images = self._preprocess(pictures).to(self._device)
        features: Tensor = self._model.encode_image(images, normalize=True).float().cpu()
        return features

    def _encode_text(self, prompt: str) -> Tensor:
        tokens = self._tokenizer([prompt]).to(self._device)
        features: Tensor = self._model.encode_text(tokens, normalize=True)[0].float()
        return features


def load_state_dict(checkpoint: Path) -> dict[str, Tensor]:
    """Weights of a ``.pt`` (``{'state_dict': ...}`` or bare) or ``.safetensors`` file.

    Raises:
        ScorerError: the file is missing, damaged, or holds anything but tensors (never unpickled).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not checkpoint.is_file():
        raise ScorerError(f"{checkpoint}: no such checkpoint file")
    try:
        if checkpoint.suffix == ".safetensors":
            return load_file(checkpoint)
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    # torch.load raises whatever a damaged zip or pickle makes it raise.
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, SafetensorError) as error:
        raise ScorerError(f"{checkpoint}: damaged checkpoint: {error}") from error
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise ScorerError(f"{checkpoint}: not a file of plain tensors: {error}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ScorerError(
            f"{checkpoint}: expected tensors by name, bare or under 'state_dict', found "
            f"{type(state).__name__}"
        )
    return state


def load_weights(model: torch.nn.Module, state: dict[str, Tensor], source: Path) -> None:
    """Fill a model with exactly these weights.

    Raises:
        ScorerError: keys are missing or left over, or shapes differ; the first few are named.
    """
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ScorerError(f"{source}: does not fit the architecture: {str(error)[:600]}") from error
