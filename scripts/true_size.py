"""Every file that a recipe names, of true size with random weights, where it names them.

    cd FOLDER && python ROOT/scripts/true_size.py ROOT/configs/flux_g2rpo_hps_lora.yaml
    ... --tiny                                             # the tiny world's files in their place

For FLUX.1-dev that is 40 GB, in the layout and the shards of the published files: transformer, text
encoders, VAE, tokenizers with whole vocabularies, HPS's ``.pt``, CLIP's folder, and prompts.
"""

import io
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import sentencepiece
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2
from torch import Tensor, nn

import measuring
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.models.family import Family
from g2rpo_ray.models.loading import RANDOM_STD, on_meta
from g2rpo_ray.plan.networks import planned_family

TEXT_ENCODERS: dict[str, dict[str, Any]] = {
    "CLIPTextModel": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "projection_dim": 768, "vocab_size": 49408,
        "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 2,
    },
    "T5EncoderModel": {
        "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24,
        "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Published sizes by class: CLIP-L, T5 v1.1 XXL."""
SHARD_BYTES = {"transformer": 10_000_000_000, "text_encoder": 5_000_000_000}
"""Most of a file, by the part's first words; published folders are cut so."""
PROMPTS = {"train": 24, "heldout": 8}


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--tiny", action="store_true", help="the tiny world's files")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args()
    config = load_config(options.recipe, options.overrides)
    write_prompts(config, options.tiny)
    (write_tiny if options.tiny else write_true_size)(config)


def write_prompts(config: Config, tiny: bool) -> None:
    """A prompt a line; those of the tiny world are all that its tokenizers know."""
    for split in PROMPTS:
        path = resolve_path(getattr(config.prompts, split))
        path.parent.mkdir(parents=True, exist_ok=True)
        known = resolve_path(f"tiny_world:prompts/{split}.txt").read_text().splitlines()
        texts = known if tiny else [f"{text}, on a {split} day" for text in known]
        path.write_text("\n".join(texts[: PROMPTS[split]]) + "\n")


def write_tiny(config: Config) -> None:
    sources = [("flux", config.model.path)]
    for reward in config.rewards.values():
        if reward.kind == "hps":
            sources.append(("hps/HPS_tiny.pt", reward.options["checkpoint"]))
        else:
            sources.append(("clip", reward.options["architecture"].removeprefix("local-dir:")))
    for name, target in sources:
        source, path = resolve_path(f"tiny_world:{name}"), resolve_path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, path) if source.is_dir() else shutil.copyfile(source, path)


def write_true_size(config: Config) -> None:
    folder = resolve_path(config.model.path)
    if folder.exists():
        raise SystemExit(f"{folder} is there already")
    family, source = planned_family(config.model.path)
    print(f"{folder}: {source}")
    write_model(folder, family)
    for name, reward in config.rewards.items():
        architecture = reward.options.get("architecture", "")
        if reward.kind == "hps":
            network = open_clip_on_meta(architecture)
            state = dict(random_tensors(network.state_dict(), torch.float16))
            torch.save({"state_dict": state}, resolve_path(reward.options["checkpoint"]))
        elif reward.kind == "clip" and architecture.startswith("local-dir:"):
            write_clip(resolve_path(architecture.removeprefix("local-dir:")))
        else:
            raise SystemExit(f"rewards.{name}: no files of true size for kind {reward.kind} here")
        print(f"reward {name}")


def write_model(folder: Path, family: Family) -> None:
    """In diffusers' layout, bfloat16, by the family's published configurations."""
    index: dict[str, Any] = {"_class_name": family.pipeline, "_diffusers_version": "0.30.0"}
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    # Tokenizers first: what fails there fails before tens of gigabytes.
    for part in sorted(family.parts, key=lambda part: not part.startswith("tokenizer")):
        kind = family.parts[part]
        place = folder / part
        if part.startswith("tokenizer"):
            write_tokenizer(kind, place)
        elif part in ("transformer", "vae"):
            network = on_meta(family, part)
            network.save_config(place)
            write_weights(network, torch.bfloat16, place, "diffusion_pytorch_model")
        else:
            network = text_encoder_on_meta(kind)
            network.config.save_pretrained(place)
            write_weights(network, torch.bfloat16, place, "model")
        index[part] = ["diffusers" if part in ("transformer", "vae") else "transformers", kind]
        print(part)
    scheduler = FlowMatchEulerDiscreteScheduler(**family.configs["scheduler"])
    scheduler.save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(index, indent=1))


def text_encoder_on_meta(kind: str) -> Any:
    if kind not in TEXT_ENCODERS:
        raise SystemExit(f"sizes of a {kind} are not known: add them to TEXT_ENCODERS")
    cls = getattr(transformers, kind)
    config = cls.config_class(**TEXT_ENCODERS[kind], architectures=[kind], dtype="bfloat16")
    with torch.device("meta"):
        return cls(config)


def write_weights(network: nn.Module, dtype: torch.dtype, folder: Path, name: str) -> None:
    """One file, or shards with an index, none larger than ``SHARD_BYTES``."""
    most = SHARD_BYTES.get(folder.name.removesuffix("_2"), 10**12)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in own_tensors(network):
        size += tensor.numel() * dtype.itemsize
        if size > most and shards[-1]:
            shards, size = [*shards, {}], tensor.numel() * dtype.itemsize
        shards[-1][key] = tensor
    files = [f"{name}-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [f"{name}.safetensors"]
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        save_file(dict(random_tensors(shard, dtype)), folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(t.numel() for shard in shards for t in shard.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index))


def own_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of the state; a tensor of several names under the first one, as libraries write it."""
    seen = set()
    for key, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield key, tensor


def random_tensors(tensors: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """On the CPU, made on a card where there is one; small, so that a deep network stays finite."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for key, tensor in tensors.items():
        if tensor.ndim > 1:
            random = torch.empty(tensor.shape, dtype=dtype, device=device).normal_(std=RANDOM_STD)
        else:
            ones = float(key.endswith(("weight", "logit_scale")))
            random = torch.full(tensor.shape, ones, dtype=dtype)
        yield key, random.cpu()


def open_clip_on_meta(architecture: str) -> Any:
    with torch.device("meta"):
        return open_clip.create_model(architecture, load_weights=False, device="meta")


def write_clip(folder: Path) -> None:
    """A folder as DFN5B's: float32, open_clip's configuration, tokenizer beside it."""
    larger = folder.name.endswith(("-384", "-378"))
    architecture = f"ViT-H-14{'-378' if larger else ''}-quickgelu"
    folder.mkdir(parents=True)
    preprocess = {
        "mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD,
        "interpolation": "bicubic", "resize_mode": "squash",
    }  # fmt: skip
    config = {"model_cfg": open_clip.get_model_config(architecture), "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer("CLIPTokenizer", folder)
    write_weights(open_clip_on_meta(architecture), torch.float32, folder, "open_clip_model")


def write_tokenizer(kind: str, folder: Path) -> None:
    """With the vocabulary files of the published one."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "CLIPTokenizer":
        clip = open_clip.SimpleTokenizer()
        names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
        vocabulary = {names.get(token, token): n for token, n in clip.encoder.items()}
        (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
        merges = "\n".join(" ".join(pair) for pair in clip.bpe_ranks)
        (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        # The published folders' model_max_length: a text is cut there.
        transformers.CLIPTokenizer.from_pretrained(folder, model_max_length=77).save_pretrained(
            folder
        )
    elif kind == "T5Tokenizer":
        (folder / "spiece.model").write_bytes(sentence_pieces(open_clip.SimpleTokenizer().encoder))
        transformers.T5Tokenizer.from_pretrained(folder, model_max_length=512).save_pretrained(
            folder
        )
    else:
        raise SystemExit(f"no vocabulary for a {kind} here")


def sentence_pieces(tokens: Iterable[str], size: int = 32000) -> bytes:
    """A unigram model of T5's size, of CLIP's tokens: whole words, parts of words, characters."""
    # Trained on next to nothing: for its normaliser and its special pieces.
    trained = io.BytesIO()
    special: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words"] * 9), model_writer=trained, vocab_size=20,
        hard_vocab_limit=False, minloglevel=2, **special,
    )  # fmt: skip
    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString(trained.getvalue())
    model.trainer_spec.vocab_size = size
    del model.pieces[len(special) - 1 :]
    words = [token for token in tokens if token.removesuffix("</w>").isascii()]
    single = ["▁", *(chr(code) for code in range(33, 127))]
    longer = (f"▁{w.removesuffix('</w>')}" if w.endswith("</w>") else w for w in words)
    pieces = list(dict.fromkeys([*single, *longer]))[: size - len(model.pieces)]
    for rank, piece in enumerate(pieces):
        # Words before the characters that they are made of.
        model.pieces.add(piece=piece, score=-math.log(rank + 2) - 10.0 * (piece in single))
    return model.SerializeToString()


if __name__ == "__main__":
    main()
