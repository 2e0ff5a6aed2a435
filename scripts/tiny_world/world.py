"""What the training stages need to know of a world: its captions, its pen and its oracle."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from g2rpo_ray.tiny_world import assets_dir, oracle, scene
from tiny_world import hard, hard_oracle, words


@dataclass(frozen=True)
class World:
    """Captions are named by their index; the first ``base`` of them have near misses."""

    name: str
    side: int
    captions: list[str]
    codes: Tensor
    """int64 [C, attributes]."""
    attributes: tuple[str, ...]
    """Of a code's columns; two groups' have the same names."""
    scenes: Tensor
    """int64 [C]: equal where two captions say the same."""
    near: Tensor
    """int64 [base, N]: captions that differ in one attribute."""
    lay_out: Callable[[Tensor, torch.Generator], Any]
    paint: Callable[[Any], Tensor]
    check: Callable[[npt.NDArray[np.uint8], Sequence[str]], npt.NDArray[np.float32]]
    train: list[str]
    heldout: list[str]
    steps: tuple[int, ...]
    """Step counts at which the painted pictures are measured."""

    @property
    def base(self) -> int:
        return len(self.near)


def change_one(
    codes: Tensor, choices: Sequence[int], colours: tuple[int, int], relation: int, seed: int
) -> Tensor:
    """Another value for one random attribute of each code; the two colours stay different.

    Args:
        codes: int64 [B, A].
        choices: how many values each attribute has.
        colours: places of the colours in a code.
        relation: place of the relation.
    """
    generator = torch.Generator().manual_seed(seed)
    count, sizes = len(codes), torch.tensor(choices)
    which = torch.randint(len(sizes), (count,), generator=generator)
    rows = torch.arange(count)
    step = 1 + (torch.rand(count, generator=generator) * (sizes[which] - 1)).long()
    changed = codes.clone()
    changed[rows, which] = (codes[rows, which] + step) % sizes[which]
    clash = changed[:, colours[0]] == changed[:, colours[1]]
    # Where both took one colour, turn to the opposite relation instead.
    opposite = codes.clone()
    opposite[:, relation] ^= 1
    return torch.where(clash[:, None], opposite, changed)


@lru_cache
def tiny() -> World:
    """The world that ships with the package."""
    scenes, choices = scene.all_scenes(), (len(scene.COLOURS), len(scene.SHAPES), 4)
    place = {each: number for number, each in enumerate(scenes)}
    codes = torch.tensor([each.code for each in scenes])
    index = torch.full((*choices, *choices[:2]), -1)
    index[codes.unbind(dim=-1)] = torch.arange(len(scenes))
    near = [change_one(codes, index.shape, (0, 3), 2, seed) for seed in range(16)]
    mirrored = torch.tensor([place[each.mirrored] for each in scenes])
    train, heldout = scene.split_captions(seed=0)
    return World(
        name="tiny",
        side=64,
        captions=scene.all_captions(),
        codes=codes,
        attributes=("colour", "shape", "relation", "colour", "shape"),
        scenes=torch.minimum(torch.arange(len(scenes)), mirrored),
        near=torch.stack([index[each.unbind(dim=-1)] for each in near], dim=1),
        lay_out=scene.lay_out,
        paint=scene.render,
        check=oracle.check,
        train=train,
        heldout=heldout,
        steps=(6, 8, 12),
    )


@lru_cache
def harder(
    seed: int = hard.SCENE_SEED, train: int = hard.TRAIN, heldout: int = hard.HELDOUT
) -> World:
    """The world of ``hard.py``: some of its 614,400 scenes, and three near misses of each."""
    base = sample_apart(train + heldout, seed)
    near = [change_one(base, hard.CHOICES, (2, 6), 1, seed + number) for number in range(3)]
    codes = torch.cat([base, *near])
    captions = [hard.caption_of(tuple(code)) for code in codes.tolist()]
    return World(
        name="hard",
        side=hard.SIDE,
        captions=captions,
        codes=codes,
        attributes=hard.ATTRIBUTES,
        scenes=scene_numbers(codes),
        near=torch.arange(len(base), len(codes)).view(3, -1).T,
        lay_out=hard.lay_out,
        paint=hard.paint,
        check=hard_oracle.check,
        train=captions[:train],
        heldout=captions[train : len(base)],
        steps=(8, 16, 28),
    )


@lru_cache
def spelt() -> World:
    """The world of ``words.py``. It has no near misses, for no reward model is trained on it."""
    train, heldout = words.prompts("train"), words.prompts("heldout")
    captions = train + heldout
    return World(
        name="words",
        side=words.SIDE,
        captions=captions,
        codes=words.codes_of(captions),
        attributes=(),
        scenes=torch.arange(len(captions)),
        near=torch.empty(len(captions), 0, dtype=torch.int64),
        lay_out=words.lay_out,
        paint=words.paint,
        check=words.check,
        train=train,
        heldout=heldout,
        steps=(6, 12),
    )


def sample_apart(count: int, seed: int) -> Tensor:
    """Scenes of which no two say the same, int64 [count, 10]."""
    codes = hard.sample_codes(count + count // 4, seed)
    _, first = np.unique(scene_numbers(codes).numpy(), return_index=True)
    return codes[np.sort(first)[:count]]


def scene_numbers(codes: Tensor) -> Tensor:
    """int64 [C]: the same for a scene of the harder world told from either side."""
    mirrored = codes[:, [0, 1, 6, 7, 8, 9, 2, 3, 4, 5]].clone()
    mirrored[:, 1] ^= 1
    mirrored[:, 0] = torch.tensor([1, 0, 3, 2, 4])[codes[:, 0]]
    places = torch.tensor([*hard.CHOICES[1:], 1]).flip(0).cumprod(0).flip(0)
    return torch.minimum((codes * places).sum(dim=1), (mirrored * places).sum(dim=1))


HARD_SIZES: dict[str, dict[str, Any]] = {
    "flux/vae/config.json": {"block_out_channels": [24, 32, 48, 64], "sample_size": hard.SIDE},
    "flux/transformer/config.json": {
        "num_layers": 2, "num_single_layers": 6, "num_attention_heads": 4,
        "attention_head_dim": 64, "axes_dims_rope": [16, 24, 24], "joint_attention_dim": 128,
        "pooled_projection_dim": 128,
    },
    "flux/text_encoder/config.json": {
        "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4,
        "max_position_embeddings": 20, "projection_dim": 128,
    },
    "flux/text_encoder_2/config.json": {"d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 3},
    "flux/tokenizer/tokenizer_config.json": {"model_max_length": 20},
    "flux/tokenizer_2/tokenizer_config.json": {"model_max_length": 16},
}  # fmt: skip
"""What differs from the shipped sizes."""
_TEXT = {"context_length": 20, "width": 96, "heads": 3, "layers": 3}
_VIEWER = {"image_size": hard.SIDE, "patch_size": 16, "width": 128, "layers": 5, "head_width": 32}
VIEWERS: dict[str, dict[str, Any]] = {
    "clip": _VIEWER,
    "hps": _VIEWER,
    "other_data": _VIEWER | {"patch_size": 8, "width": 96, "layers": 4},
    "other_network": {"image_size": hard.SIDE, "layers": [1, 2, 2, 1], "width": 12},
}
"""Picture towers of the harder world's scorers; the last two are never trained on. A list of layers
makes open_clip's ResNet."""


def prepare(world: World, out: Path) -> None:
    """Write what needs no training: prompts, tokenizers, configurations."""
    root = assets_dir() / "words" if world.name == "words" else assets_dir()
    folders = ("flux", "clip", "hps")
    parts = sorted(path for folder in folders for path in (root / folder).rglob("*.json"))
    files = {str(path.relative_to(root)): path.read_text() for path in parts}
    if world.name == "hard":
        files = _larger(files)
    files |= {
        f"prompts/{name}.txt": "\n".join(captions) + "\n"
        for name, captions in (("train", world.train), ("heldout", world.heldout))
    }
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)


def _larger(files: dict[str, str]) -> dict[str, str]:
    """The shipped files with the harder world's words and sizes."""
    files = {name: text for name, text in files.items() if not name.startswith("hps/")}
    bpe, unigram = "flux/tokenizer/tokenizer.json", "flux/tokenizer_2/tokenizer.json"
    clip_words, t5_words = _bpe_of(files[bpe]), _unigram_of(files[unigram])
    vocabulary = len(clip_words["model"]["vocab"])
    changes = {name: dict(values) for name, values in HARD_SIZES.items()}
    changes["flux/text_encoder/config.json"] |= {
        "vocab_size": vocabulary, "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1,
    }  # fmt: skip
    changes["flux/text_encoder_2/config.json"]["vocab_size"] = len(t5_words["model"]["vocab"])
    for name, values in changes.items():
        files[name] = json.dumps(json.loads(files[name]) | values, indent=2)
    files[bpe], files[unigram] = json.dumps(clip_words), json.dumps(t5_words)
    settings = json.loads(files.pop("clip/open_clip_config.json"))
    tokens = json.loads(files.pop("clip/tokenizer_config.json")) | {"model_max_length": 20}
    del files["clip/tokenizer.json"]
    for name, tower in VIEWERS.items():
        text = settings["model_cfg"]["text_cfg"] | _TEXT | {"vocab_size": vocabulary}
        settings["model_cfg"] = {"embed_dim": 96, "vision_cfg": tower, "text_cfg": text}
        files |= {
            f"{name}/open_clip_config.json": json.dumps(settings, indent=2),
            f"{name}/tokenizer_config.json": json.dumps(tokens, indent=2),
            f"{name}/tokenizer.json": files[bpe],
        }
    return files


def _bpe_of(text: str) -> dict[str, Any]:
    """CLIP's tokenizer with merges that make every word of the harder world one token."""
    whole = json.loads(text)
    letters = list(whole["model"]["vocab"])[:512]
    merges: list[list[str]] = []
    known: set[str] = set()
    for word in hard.words():
        pieces = [*word[:-1], word[-1] + "</w>"]
        # By the merges so far, as the tokenizer will; then the rest from the left.
        for pair in merges:
            pieces = _merged(pieces, pair)
        while len(pieces) > 1:
            pair, joined = pieces[:2], "".join(pieces[:2])
            if joined not in known:
                known.add(joined)
                merges.append(pair)
            pieces = _merged(pieces, pair)
    names = [*letters, *dict.fromkeys("".join(pair) for pair in merges)]
    special = [token["content"] for token in whole["added_tokens"]]
    whole["model"]["vocab"] = {name: number for number, name in enumerate([*names, *special])}
    whole["model"]["merges"] = merges
    ids = {name: len(names) + number for number, name in enumerate(special)}
    for token in whole["added_tokens"]:
        token["id"] = ids[token["content"]]
    for end in ("sep", "cls"):
        name = whole["post_processor"][end][0]
        whole["post_processor"][end] = [name, ids[name]]
    return dict(whole)


def _merged(pieces: list[str], pair: list[str]) -> list[str]:
    result: list[str] = []
    for piece in pieces:
        if result and [result[-1], piece] == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return result


def _unigram_of(text: str) -> dict[str, Any]:
    """T5's tokenizer with the harder world's words."""
    whole = json.loads(text)
    known = {name for name, _ in whole["model"]["vocab"]}
    new = [f"▁{word}" for word in hard.words() if f"▁{word}" not in known]
    whole["model"]["vocab"] += [[name, -3.0] for name in new]
    return dict(whole)
