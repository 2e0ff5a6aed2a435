"""Every file that a recipe names, of true size with random weights, where it names them.

    cd FOLDER && python ROOT/scripts/true_size.py ROOT/configs/flux_g2rpo_hps_lora.yaml
    ... --tiny                                             # the tiny world's files in their place
    ... --embedded                   # text encoders without weights; random embeddings, no prompts

For FLUX.1-dev that is 40 GB, in the layout and the shards of the published files: transformer, text
encoders, VAE, tokenizers with whole vocabularies, HPS's ``.pt``, CLIP's folder, and prompts.
"""

import io
import itertools
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
import torch
import transformers
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler
from huggingface_hub import split_torch_state_dict_into_shards
from open_clip.tokenizer import bytes_to_unicode
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2
from torch import Tensor, nn

import measuring
import program
from g2rpo_ray.common.files import sha256_of_file
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.models.families import negative_prompt, open_family
from g2rpo_ray.models.family import Family
from g2rpo_ray.models.loading import DTYPES, RANDOM_STD, on_meta
from g2rpo_ray.plan.networks import planned_family
from g2rpo_ray.prompts.embeddings import (
    NEGATIVE_FILE,
    Manifest,
    ShardFile,
    encoder_fingerprint,
    prompt_checksum,
    stacked,
    write_manifest,
)
from g2rpo_ray.prompts.reading import PROMPTS_FILE

TEXT_ENCODERS: dict[str, dict[str, Any]] = yaml.safe_load(
    (measuring.ROOT / "scripts" / "text_encoders.yaml").read_text(encoding="utf-8")
)
QWEN_TOKENS, MISTRAL_TOKENS = 151_643, 131_000
"""Of the vocabularies, before their special tokens."""
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What the published templates make of the pipelines' messages: roles, texts, thoughts left out."""
SHARD_BYTES = {"transformer": 10_000_000_000, "text_encoder": 5_000_000_000}
"""Most of a file, by the part's first words; published folders are cut so."""
PROMPTS = {"train": 24, "heldout": 8}


def main() -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--tiny", action="store_true", help="the tiny world's files")
    parser.add_argument("--embedded", action="store_true", help="random embeddings of prompts")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args()
    config = load_config(options.recipe, options.overrides)
    if (folder := resolve_path(config.model.path)).exists():
        raise SystemExit(f"{folder} is there already")
    if options.tiny:
        shutil.copytree(resolve_path("tiny_world:flux"), folder)
    else:
        family, source = planned_family(config.model.path)
        print(f"{folder}: {source}")
        write_model(folder, family, text_encoders=not options.embedded)
    (write_tiny_scorers if options.tiny else write_scorers)(config)
    write_prompts(config, options.tiny, options.embedded)


def write_prompts(config: Config, tiny: bool, embedded: bool = False) -> None:
    """A prompt a line; those of the tiny world are all that its tokenizers know."""
    for split in PROMPTS:
        path = resolve_path(getattr(config.prompts, split))
        path.parent.mkdir(parents=True, exist_ok=True)
        known = resolve_path(f"tiny_world:prompts/{split}.txt").read_text().splitlines()
        texts = known if tiny else [f"{text}, on a {split} day" for text in known]
        texts = texts[: PROMPTS[split]]
        if embedded:
            write_embeddings(config, path, texts)
        else:
            path.write_text("\n".join(texts) + "\n")


def write_embeddings(config: Config, folder: Path, texts: Sequence[str]) -> None:
    """Random ones, as ``g2rpo embed`` writes those of the text encoders; those are not needed."""
    folder.mkdir(parents=True)
    family = open_family(resolve_path(config.model.path))
    transformer = on_meta(family, "transformer")
    length, dtype = config.prompts.max_sequence_length, DTYPES[config.model.dtype]
    random = partial(measuring.random_conditioning, family, transformer, length, dtype)
    prompts, negative = [random(n + 1) for n in range(len(texts))], negative_prompt(config)
    shard = folder / "shard_00000.safetensors"
    save_file(stacked(prompts), shard)
    if negative is not None:
        save_file(dict(random(0).tensors), folder / NEGATIVE_FILE)
    rows = [
        {"text": text, "shard": 0, "row": row, "checksum": prompt_checksum(prompts[row])}
        for row, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / PROMPTS_FILE)
    size = shard.stat().st_size
    manifest = Manifest(
        encoder=encoder_fingerprint(config.model), dtype=config.model.dtype,
        max_sequence_length=length, prompts=len(texts), source="random", left_out={},
        files=[ShardFile(shard.name, len(texts), size, sha256_of_file(shard))],
        prompts_sha256=sha256_of_file(folder / PROMPTS_FILE), pipeline=family.pipeline,
        negative_prompt=negative,
        negative_checksum=None if negative is None else prompt_checksum(random(0)),
    )  # fmt: skip
    write_manifest(folder, manifest)


def write_tiny_scorers(config: Config) -> None:
    """The tiny world's, where a recipe has those of true size."""
    for reward in config.rewards.values():
        name, target = "hps/HPS_tiny.pt", reward.options.get("checkpoint", "")
        if reward.kind != "hps":
            name, target = "clip", reward.options["architecture"].removeprefix("local-dir:")
        source, path = resolve_path(f"tiny_world:{name}"), resolve_path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, path) if source.is_dir() else shutil.copyfile(source, path)


def write_scorers(config: Config) -> None:
    for name, reward in config.rewards.items():
        architecture = reward.options.get("architecture", "")
        if reward.kind == "hps":
            network = open_clip_on_meta(architecture)
            state = dict(random_tensors(network.state_dict(), torch.float16))
            path = resolve_path(reward.options["checkpoint"])
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"state_dict": state}, path)
        elif reward.kind == "clip" and architecture.startswith("local-dir:"):
            write_clip(resolve_path(architecture.removeprefix("local-dir:")))
        else:
            raise SystemExit(f"rewards.{name}: no files of true size for kind {reward.kind} here")
        print(f"reward {name}")


def write_model(
    folder: Path, family: Family, *, networks: bool = True, text_encoders: bool = True
) -> None:
    """In diffusers' layout, bfloat16, by the family's published configurations; networks and text
    encoders can be left without weights."""
    index: dict[str, Any] = {"_class_name": family.pipeline, "_diffusers_version": "0.30.0"}
    index |= family.configs.get("model_index", {})
    index["scheduler"] = ["diffusers", family.scheduler]
    # Tokenizers first: what fails there fails before tens of gigabytes.
    for part in sorted(family.parts, key=lambda part: not part.startswith("tokenizer")):
        kind = family.parts[part]
        place = folder / part
        if part.startswith("tokenizer"):
            write_tokenizer(kind, place)
        elif part in ("transformer", "vae"):
            network = on_meta(family, part)
            network.save_config(place)
            if networks:
                write_weights(network, torch.bfloat16, place, "diffusion_pytorch_model")
        else:
            network = text_encoder_on_meta(family, part)
            network.config.save_pretrained(place)
            if text_encoders:
                write_weights(network, torch.bfloat16, place, "model")
            else:
                save_file({}, place / "model.safetensors", metadata={"format": "pt"})
        index[part] = ["diffusers" if part in ("transformer", "vae") else "transformers", kind]
        print(part)
    scheduler = FlowMatchEulerDiscreteScheduler(**family.configs["scheduler"])
    scheduler.save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(index, indent=1))


def text_encoder_on_meta(family: Family, part: str) -> Any:
    choice = TEXT_ENCODERS["parts"].get(family.pipeline, {}).get(part)
    if choice is None:
        raise SystemExit(
            f"sizes of {part} of a {family.pipeline} are not known: add them to text_encoders.yaml"
        )
    width = family.configs["transformer"].get("joint_attention_dim")
    sizes = TEXT_ENCODERS["sizes"][choice.get(width) or choice["any"]]
    kind = family.parts[part]
    cls = getattr(transformers, kind)
    config = cls.config_class(**sizes, architectures=[kind], dtype="bfloat16")
    with torch.device("meta"):
        return cls(config)


def write_weights(network: nn.Module, dtype: torch.dtype, folder: Path, name: str) -> None:
    """One file, or shards with an index, none larger than ``SHARD_BYTES``."""
    tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in own_tensors(network)}
    split = split_torch_state_dict_into_shards(
        tensors,
        filename_pattern=f"{name}{{suffix}}.safetensors",
        max_shard_size=SHARD_BYTES.get(folder.name.removesuffix("_2"), 10**12),
    )
    for file, keys in split.filename_to_tensors.items():
        shard = dict(random_tensors({key: tensors[key] for key in keys}, dtype))
        save_file(shard, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
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
        if not tensor.is_floating_point():
            random = torch.zeros(tensor.shape, dtype=tensor.dtype)
        elif tensor.ndim > 1:
            random = torch.empty(tensor.shape, dtype=dtype, device=device).normal_(std=RANDOM_STD)
        else:
            ones = float(key.endswith(("weight", "logit_scale", "running_var")))
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
    elif kind == "Qwen2Tokenizer":
        byte_level(QWEN_TOKENS).save_pretrained(folder)
    elif kind == "PixtralProcessor":
        transformers.PixtralProcessor(
            transformers.PixtralImageProcessor(),
            byte_level(MISTRAL_TOKENS, "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
            chat_template=CHAT,
        ).save_pretrained(folder)
    else:
        raise SystemExit(f"no vocabulary for a {kind} here")


def byte_level(size: int, *special: str) -> transformers.Qwen2Tokenizer:
    """Byte-level BPE of ``size`` tokens, special ones behind them.

    Its merges are CLIP's without the mark of a word's end, then some that few texts meet.
    """
    merges: dict[tuple[str, str], None] = {}
    vocabulary = {token: n for n, token in enumerate(bytes_to_unicode().values())}
    for first, second in open_clip.SimpleTokenizer().bpe_ranks:
        pair = first, second.removesuffix("</w>")
        if pair[1] and {*pair} <= vocabulary.keys():
            merges[pair] = None
            vocabulary.setdefault("".join(pair), len(vocabulary))
    # The last merges begin with bytes that no text has: control characters come first.
    rare = [token for token in bytes_to_unicode().values() if ord(token) > 255]
    for pair in itertools.product(rare, list(vocabulary)):
        if len(vocabulary) == size:
            break
        if "".join(pair) not in vocabulary:
            merges[pair] = None
            vocabulary["".join(pair)] = len(vocabulary)
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *special):
        vocabulary[token] = len(vocabulary)
    return transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=list(merges), eos_token="<|im_end|>", chat_template=CHAT,
        extra_special_tokens=["<|im_start|>", *special], model_max_length=131_072,
    )  # fmt: skip


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
    program.run(main)
