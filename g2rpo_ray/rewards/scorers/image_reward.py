"""ImageReward (arXiv 2304.05977): BLIP reads picture and prompt together, a small head scores them.

Its package needs an old transformers; here its checkpoint runs on transformers' own BLIP.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.tokenizers import load_tokenizer
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers.clip import ClipOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_TOKENS = 35
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the scores that the published model gave its authors' data."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TEXT_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "layer_norm_eps",
)  # fmt: skip
"""What med_config.json tells of the text encoder."""
UNUSED = ("blip.vision_proj.", "blip.text_proj.")
"""Projections of BLIP's pre-training, which the score does not use."""
_BLOCK = r"^blip\.visual_encoder\.blocks\.(\d+)\."
_LAYER = r"vision.encoder.layers.\1."
RENAMED = [
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.layers\.", "head."),
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (_BLOCK + r"attn\.qkv\.", _LAYER + "self_attn.qkv."),
    (_BLOCK + r"attn\.proj\.", _LAYER + "self_attn.projection."),
    (_BLOCK + r"norm(\d)\.", _LAYER + r"layer_norm\2."),
    (_BLOCK + r"mlp\.", _LAYER + "mlp."),
]
"""Names in the checkpoint -> names in transformers' modules."""


class ImageRewardScorer(RewardScorer):
    """About -2 to 2; 0 is the mean of the published model's data. The head computes in float32."""

    class Options(ClipOptions):
        checkpoint: str
        """``ImageReward.pt``, or the same tensors in a safetensors file."""
        med_config: str
        """``med_config.json`` that lies beside it: the text encoder's sizes."""
        tokenizer: str
        """Folder with BERT's tokenizer (``bert-base-uncased``)."""

    kind = "image_reward"

    @classmethod
    def check_files(cls, options: Options) -> None:
        from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict

        _text_of(options)
        load_state_dict(resolve_path(options.checkpoint), "meta")

    def __init__(self, options: Options, device: str) -> None:
        import torch

        from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict, load_weights, renamed
        from g2rpo_ray.rewards.scorers.clip_features import DTYPES
        from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess

        checkpoint, (sizes, self._tokenizer) = resolve_path(options.checkpoint), _text_of(options)
        state = {
            renamed(name, RENAMED): tensor
            for name, tensor in load_state_dict(checkpoint).items()
            if not name.startswith(UNUSED) and not name.endswith("position_ids")
        }
        self._model = build_model(state, sizes, checkpoint)
        load_weights(self._model, state, checkpoint)
        self._device, self._dtype = torch.device(device), DTYPES[options.dtype]
        self._model.to(self._device).eval()
        for part in ("vision", "text"):
            self._model[part].to(self._dtype)
        vision: Any = self._model["vision"]
        side = vision.config.image_size
        self._preprocess = ClipPreprocess((side, side), CLIP_MEAN, CLIP_STD)

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        from g2rpo_ray.rewards.scorers.preprocess import to_device

        with torch.inference_mode():
            images = self._preprocess(to_device(pictures, self._device)).to(self._dtype)
            seen = self._model["vision"](images).last_hidden_state
            tokens = self._tokenizer(
                list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS,
                return_tensors="pt",
            ).to(self._device)  # fmt: skip
            scores = rate(self._model, seen, tokens.input_ids, tokens.attention_mask)
            return ((scores - MEAN) / STD).cpu()


def _text_of(options: ImageRewardScorer.Options) -> tuple[dict[str, Any], Any]:
    """Sizes of the text encoder, and its tokenizer."""
    from transformers import AutoTokenizer

    sizes = read_json_object(resolve_path(options.med_config), ScorerError)
    folder = resolve_path(options.tokenizer)
    if not (folder / "tokenizer_config.json").is_file():
        raise ScorerError(f"{folder}: no tokenizer_config.json in it")
    read = partial(AutoTokenizer.from_pretrained, folder, local_files_only=True)
    return sizes, load_tokenizer(read, folder, sizes.get("vocab_size"), ScorerError)


def rate(model: nn.ModuleDict, seen: Tensor, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Scores ``[B]``, before they are centred and scaled, of what ``vision`` has seen and texts."""
    import torch

    read = model["text"](
        token_ids,
        attention_mask=attention_mask,
        encoder_hidden_states=seen,
        encoder_attention_mask=torch.ones(seen.shape[:2], device=seen.device),
    ).last_hidden_state
    scores: Tensor = model["head"](read[:, 0].float()).squeeze(-1)
    return scores


def build_model(state: dict[str, Tensor], text: dict[str, Any], source: Path) -> nn.ModuleDict:
    """Both encoders and the head, without weights, in the sizes that the weights have.

    Raises:
        ScorerError: they lack what the sizes are read from, or med_config is another model's.
    """
    from torch import nn
    from transformers import BlipTextConfig, BlipVisionConfig
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    try:
        places, width = state["vision.embeddings.position_embedding"].shape[1:]
        patch = state["vision.embeddings.patch_embedding.weight"].shape[-1]
        inner = state["vision.encoder.layers.0.mlp.fc1.weight"].shape[0]
        text_config = BlipTextConfig(
            **{name: text[name] for name in TEXT_SIZES},
            encoder_hidden_size=width,
            is_decoder=True,  # transformers' word for "has cross-attention"
        )
    except (KeyError, ValueError) as error:
        raise ScorerError(f"{source}: {error}; expected ImageReward's tensors and sizes") from error
    vision_config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=len({n.split(".")[3] for n in state if n.startswith("vision.encoder.")}),
        num_attention_heads=width // 64,
        image_size=patch * round((places - 1) ** 0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    # Linear layers by number; the dropout between them is for training.
    layers = {
        int(n.split(".")[1]): nn.Linear(tensor.shape[1], tensor.shape[0])
        for n, tensor in state.items()
        if re.match(r"head\.\d+\.weight", n)
    }
    return nn.ModuleDict(
        {
            "vision": BlipVisionModel(vision_config),
            "text": BlipTextModel(text_config, add_pooling_layer=False),
            "head": nn.Sequential(OrderedDict((str(n), layers[n]) for n in sorted(layers))),
        }
    )
