"""A tiny Stable Diffusion 3.5 of random weights."""

from pathlib import Path

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from g2rpo_ray.common.paths import resolve_path
from tests.models.families.parts import tiny_vae

CLIP_TOKENS = 77


def build(folder: Path) -> None:
    """Two blocks of width 32, the first with a second attention; the tiny world's tokenizers."""
    flux = resolve_path("tiny_world:flux")
    clip_tokenizer = CLIPTokenizer.from_pretrained(flux / "tokenizer", model_max_length=CLIP_TOKENS)
    t5 = T5Config.from_pretrained(flux / "text_encoder_2")
    t5.update({"num_layers": 1})
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=t5.d_model,
            caption_projection_dim=32,
            pooled_projection_dim=16 + 24,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        vae=tiny_vae(1.5305, 0.0609),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=_clip(flux, 16),
        tokenizer=clip_tokenizer,
        text_encoder_2=_clip(flux, 24),
        tokenizer_2=clip_tokenizer,
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=T5Tokenizer.from_pretrained(flux / "tokenizer_2"),
    ).save_pretrained(folder)


def _clip(flux: Path, width: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig.from_pretrained(flux / "text_encoder")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "projection_dim"), width)
    config.update(sizes | {"max_position_embeddings": CLIP_TOKENS})
    return CLIPTextModelWithProjection(config)
