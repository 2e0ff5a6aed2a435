"""Make small models for the scorers that the tiny world does not ship, in their real file formats.

    python scripts/build_tiny_scorers.py --out scorers

takes minutes on a CPU, and prints the overrides with which ``g2rpo evaluate`` scores by them, too:

- PickScore: a transformers CLIPModel, half way between the weights of the tiny clip and hps;
- aesthetic: a linear head on the tiny clip, fitted to tell sound pictures from flawed ones;
- ImageReward: a BLIP trained on preferences between drawn pictures.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

import program
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict, renamed
from g2rpo_ray.rewards.scorers.clip_features import ClipFeatures
from g2rpo_ray.rewards.scorers.image_reward import build_model, rate
from g2rpo_ray.rewards.scorers.open_clip_model import load_clip_features
from g2rpo_ray.rewards.scorers.preprocess import ClipPreprocess, to_device
from g2rpo_ray.tiny_world import assets_dir
from g2rpo_ray.tiny_world.scene import all_captions
from tiny_world.fitting import Fitted, Session, fit
from tiny_world.pictures import PictureSource, blur, to_network, to_pictures

CLIP = "local-dir:tiny_world:clip"
MEAN, STD = list(open_clip.OPENAI_DATASET_MEAN), list(open_clip.OPENAI_DATASET_STD)
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BLIP_WIDTH, BLIP_LAYERS, BLIP_PATCH, SIDE = 64, 2, 16, 64
TEXT_LENGTH = 10  # tokens: start, at most eight words, end

_TOWER = [
    (r"\.resblocks\.(\d+)\.", r".layers.\1."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
]
_CLIP_NAMES = [
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.transformer\.", "vision_model.encoder."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^transformer\.", "text_model.encoder."),
    (r"^text_projection$", "text_projection.weight"),
]
"""open_clip's names -> those of a transformers CLIPModel."""
_BLIP_NAMES = [
    (r"^text\.", "blip.text_encoder."),
    (r"^head\.", "mlp.layers."),
    (r"^vision\.embeddings\.class_embedding$", "blip.visual_encoder.cls_token"),
    (r"^vision\.embeddings\.position_embedding$", "blip.visual_encoder.pos_embed"),
    (r"^vision\.embeddings\.patch_embedding\.", "blip.visual_encoder.patch_embed.proj."),
    (r"^vision\.post_layernorm\.", "blip.visual_encoder.norm."),
    (r"^vision\.encoder\.layers\.", "blip.visual_encoder.blocks."),
    (r"\.self_attn\.qkv\.", ".attn.qkv."),
    (r"\.self_attn\.projection\.", ".attn.proj."),
    (r"\.layer_norm(\d)\.", r".norm\1."),
]
"""transformers' names of BLIP -> those of ImageReward.pt."""


def to_transformers(state: Mapping[str, Tensor]) -> CLIPModel:
    """A CLIPModel with the weights of one of the tiny world's open_clip models."""
    sizes = json.loads((assets_dir() / "clip" / "open_clip_config.json").read_text())["model_cfg"]
    vision, text = sizes["vision_cfg"], sizes["text_cfg"]
    config = CLIPConfig(
        text_config=_tower(text, text["heads"])
        | {
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["context_length"],
            "bos_token_id": text["vocab_size"] - 2,
            "eos_token_id": text["vocab_size"] - 1,
            "pad_token_id": 0,
        },
        vision_config=_tower(vision, vision["width"] // vision["head_width"])
        | {"image_size": vision["image_size"], "patch_size": vision["patch_size"]},
        projection_dim=sizes["embed_dim"],
    )
    model = CLIPModel(config)
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        value = tensor.float()
        new = renamed(name, [*_CLIP_NAMES, *_TOWER])
        if name in ("visual.proj", "text_projection"):
            value = value.T
        if match := re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", new):
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                found[f"{match[1]}.self_attn.{part}_proj.{match[2]}"] = rows
        else:
            found[new] = value
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not [*unexpected, *(name for name in missing if "position_ids" not in name)]
    return model.eval()


def _tower(sizes: dict[str, int], heads: int) -> dict[str, Any]:
    return {
        "hidden_size": sizes["width"],
        "intermediate_size": 4 * sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": heads,
        "hidden_act": "gelu",
    }


def write_pickscore(folder: Path, model: CLIPModel) -> None:
    """A folder as PickScore's scorer takes it: model, tokenizer and preprocessing."""
    model.save_pretrained(folder)
    CLIPTokenizer.from_pretrained(assets_dir() / "clip").save_pretrained(folder)
    side = model.config.vision_config.image_size
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    CLIPImageProcessor(**sizes).save_pretrained(folder)


def fit_aesthetic_head(features: ClipFeatures, seed: int, pictures: int) -> dict[str, Tensor]:
    """LAION's linear head: least squares to 7 for sound pictures and 3 for flawed ones.

    Args:
        features: of the CLIP that the head belongs to.
        pictures: of each kind.
    """
    source = PictureSource(torch.device("cpu"), seed)
    captions = source.captions(pictures)
    kinds = [source.draw(captions), source.draw_flawed(captions)]
    seen = torch.cat([features.image(_worn(kind, source.generator)) for kind in kinds]).cpu()
    wanted = torch.tensor([7.0, 3.0]).repeat_interleave(pictures)
    with_one = torch.cat((seen, torch.ones(len(seen), 1)), dim=1)
    solution = torch.linalg.lstsq(with_one, wanted[:, None]).solution[:, 0]
    return {"weight": solution[None, :-1].clone(), "bias": solution[-1:].clone()}


def train_image_reward(folder: Path, steps: int, families: int, seed: int) -> float:
    """Train a small BLIP on preferences and write ImageReward.pt, med_config.json and tokenizer.

    A picture is to score higher under its caption than under a near miss and another caption, and
    than a flawed picture of its caption.

    Returns:
        Share of new pictures that score higher under their caption than under a near miss.
    """
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    words = sorted({word for caption in all_captions() for word in caption.split()})
    (folder / "vocab.txt").write_text("\n".join([*BERT_SPECIAL, *words]) + "\n")
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "vocab.txt").unlink()
    text = {
        "vocab_size": len(tokenizer), "hidden_size": BLIP_WIDTH, "num_hidden_layers": BLIP_LAYERS,
        "intermediate_size": 4 * BLIP_WIDTH, "num_attention_heads": 2,
        "max_position_embeddings": 35, "layer_norm_eps": 1e-12,
    }  # fmt: skip
    (folder / "med_config.json").write_text(json.dumps(text, indent=2) + "\n")
    model = build_model(_blip_sizes(), text, folder).train()
    tokens = tokenizer(
        all_captions(), padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt"
    )
    preprocess = ClipPreprocess((SIDE, SIDE), MEAN, STD)

    def score(pictures: Tensor, captions: Tensor) -> Tensor:
        """float32 [B, C] of uint8 [B, 64, 64, 3] and caption indices [B, C], with gradients."""
        seen = model["vision"](preprocess(to_device(pictures, torch.device("cpu"))))
        states = seen.last_hidden_state.repeat_interleave(captions.shape[1], dim=0)
        rows = captions.flatten()
        scores = rate(model, states, tokens.input_ids[rows], tokens.attention_mask[rows])
        return scores.view(captions.shape)

    source = PictureSource(torch.device("cpu"), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)

    def batch_loss(_half: bool) -> Tensor:
        captions, near = source.families(families, 2).unbind(dim=1)
        right = _worn(source.draw(captions), source.generator)
        flawed = _worn(source.draw_flawed(captions), source.generator)
        own, miss, other = score(right, torch.stack((captions, near, captions.roll(1)), dim=1)).T
        spoiled = score(flawed, captions[:, None])[:, 0]
        return torch.stack(
            [F.softplus(worse - own).mean() for worse in (miss, other, spoiled)]
        ).sum()

    of = Fitted(
        "image_reward", model, optimizer, schedule, batch_loss, generators=[source.generator]
    )
    fit(of, steps, Session(torch.device("cpu"), seed))
    state = {renamed(name, _BLIP_NAMES): tensor for name, tensor in model.state_dict().items()}
    torch.save(state, folder / "ImageReward.pt")
    captions, near = source.families(512, 2).unbind(dim=1)
    with torch.no_grad():
        model.eval()
        own, miss = score(source.draw(captions), torch.stack((captions, near), dim=1)).T
    return float((own > miss).float().mean())


def scorer_options(out: Path) -> dict[str, dict[str, Any]]:
    """Options of each scorer, by its kind."""
    return {
        "pickscore": {"path": str(out / "pickscore")},
        "aesthetic": {"architecture": CLIP, "head": str(out / "aesthetic.pth")},
        "image_reward": {
            "checkpoint": str(out / "image_reward" / "ImageReward.pt"),
            "med_config": str(out / "image_reward" / "med_config.json"),
            "tokenizer": str(out / "image_reward" / "tokenizer"),
        },
    }


def _blip_sizes() -> dict[str, Tensor]:
    """The tensors that ``build_model`` reads sizes from."""
    places = (SIDE // BLIP_PATCH) ** 2 + 1
    layer = torch.empty(4 * BLIP_WIDTH, BLIP_WIDTH)
    return {
        "vision.embeddings.position_embedding": torch.empty(1, places, BLIP_WIDTH),
        "vision.embeddings.patch_embedding.weight": torch.empty(
            BLIP_WIDTH, 3, BLIP_PATCH, BLIP_PATCH
        ),
        **{f"vision.encoder.layers.{n}.mlp.fc1.weight": layer for n in range(BLIP_LAYERS)},
        "head.0.weight": torch.empty(32, BLIP_WIDTH),
        "head.2.weight": torch.empty(1, 32),
    }


def _worn(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 [B, 64, 64, 3], some softer and noisier, as a generator's pictures are."""
    values = to_network(pictures)
    soft = (torch.rand(len(values), generator=generator) - 0.5).clamp(min=0) * 1.6
    noise = 0.06 * torch.rand(len(values), 1, 1, 1, generator=generator)
    return to_pictures(
        blur(values, 1.0, soft) + noise * torch.randn(values.shape, generator=generator)
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of all training (0)")
    parser.add_argument("--steps", type=int, default=2000, help="of ImageReward's training (2000)")
    options = parser.parse_args(arguments)
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)

    clip, hps = (
        load_state_dict(resolve_path(f"tiny_world:{file}"))
        for file in ("clip/open_clip_model.safetensors", "hps/HPS_tiny.pt")
    )
    half_way = {name: (clip[name].float() + hps[name].float()) / 2 for name in clip}
    write_pickscore(out / "pickscore", to_transformers(half_way))

    features = load_clip_features(CLIP, None, "cpu", "float32")
    torch.save(fit_aesthetic_head(features, options.seed, 2048), out / "aesthetic.pth")

    right = train_image_reward(out / "image_reward", options.steps, 48, options.seed)
    print(f"image_reward: a new picture scores above a near miss in {right:.1%} of 512 pairs")
    for name, settings in scorer_options(out).items():
        reward = {"kind": name, "weight": 0, "cpus_per_replica": 0.1, "options": settings}
        print(f"'rewards.{name}={json.dumps(reward)}'")


if __name__ == "__main__":
    program.run(main)
