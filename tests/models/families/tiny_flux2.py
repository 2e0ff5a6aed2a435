"""A tiny FLUX.2 [klein], not distilled or distilled, and a tiny FLUX.2 [dev], of random weights."""

import json
from pathlib import Path

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

from tests.models.families import tiny_qwen

CHAT = "{% for m in messages if m.role == 'user' %}{{ m.content[0].text }}{% endfor %}"


def build_klein(folder: Path, *, distilled: bool = False) -> None:
    tokenizer = tiny_qwen.tokenizer()
    Flux2KleinPipeline(
        **_parts(heads=2),
        text_encoder=tiny_qwen.qwen3(len(tokenizer)),
        tokenizer=tokenizer,
        is_distilled=distilled,
    ).save_pretrained(folder)
    _name_layers(folder)


def build_klein_distilled(folder: Path) -> None:
    build_klein(folder, distilled=True)


def build_dev(folder: Path) -> None:
    """Its template leaves the system's message out, so that few tokens hold a prompt's words."""
    tokenizer = tiny_qwen.tokenizer()
    tokenizer.add_special_tokens(
        {"extra_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]},
        replace_extra_special_tokens=False,
    )
    text = tiny_qwen.sizes(len(tokenizer)) | {"model_type": "mistral", "head_dim": 8}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "image_size": 32,
        "patch_size": 4,
        "head_dim": 8,
    }
    Flux2Pipeline(
        **_parts(heads=3),
        text_encoder=Mistral3ForConditionalGeneration(
            Mistral3Config(text_config=text, vision_config=vision)
        ),
        tokenizer=PixtralProcessor(
            PixtralImageProcessor(patch_size=4, size={"longest_edge": 32}),
            tokenizer,
            patch_size=4,
            chat_template=CHAT,
        ),
    ).save_pretrained(folder)
    _name_layers(folder)


def _parts(*, heads: int) -> dict[str, object]:
    """dev is wider than klein, and has guidance embedded."""
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
    )
    # As training leaves them, not 0 and 1.
    vae.bn.running_mean.normal_(std=0.5)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return {
        "transformer": Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=3 * 16,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=heads == 3,
        ),
        "vae": vae,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


def _name_layers(folder: Path) -> None:
    common = {"text_encoder_out_layers": [1, 2, 3]}
    (folder / "call.json").write_text(json.dumps({"common": common}))
