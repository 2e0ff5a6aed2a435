"""What benchmarks share: settings, FLUX.1-dev's sizes with random weights, times, results."""

import argparse
import io
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import yaml
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

import program
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.section import problems
from g2rpo_ray.config import Config, load_config
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.family import Family
from g2rpo_ray.models.flux1.family import Flux1

ROOT = Path(__file__).parents[1]
GIB = 2**30
PROMPT = "a red circle left of a green triangle"
SCORER = "ViT-H-14"
"""Architecture of the true-size scorers."""
T = TypeVar("T")


def settings(*names: str) -> list[str]:
    """Overrides: those that ``settings.yaml`` has under these names, in their order."""
    known = yaml.safe_load((ROOT / "scripts" / "settings.yaml").read_text(encoding="utf-8"))
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"scripts/settings.yaml has no {', '.join(unknown)}: add it there")
    return [f"{key}={json.dumps(value)}" for name in names for key, value in known[name].items()]


def run_config(
    overrides: Sequence[str], rewards: Sequence[str] | None = None, path: Path | None = None
) -> Config:
    """Settings of a run, by default the quickstart's, with overrides; of its rewards, only those
    named."""
    config = load_config(path or ROOT / "configs" / "quickstart.yaml", list(overrides))
    names = config.rewards if rewards is None else rewards
    return config.model_copy(update={"rewards": {name: config.rewards[name] for name in names}})


def watched(samples: Path) -> dict[str, str]:
    """Environment of a process whose memory, and that of all that it starts, is to be sampled into
    the folder ``samples`` (``watching/``)."""
    samples.mkdir(parents=True)
    paths = [str(ROOT / "scripts" / "watching"), os.environ.get("PYTHONPATH", "")]
    found = {"G2RPO_MEMORY_SAMPLES": str(samples), "PYTHONPATH": ":".join(filter(None, paths))}
    return os.environ | found | {"PYTHONUNBUFFERED": "1"}


def write_model_folder(folder: Path, tiny: bool) -> Path:
    """A model folder of FLUX.1-dev's sizes: its architecture, and text encoders of one layer.

    Weights of transformer and VAE are not in it (``model.random_weights``).
    """
    shutil.copytree(resolve_path("tiny_world:flux"), folder)
    if tiny:
        return folder
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    published = Flux1.published["FLUX.1-dev"].configs
    for part in ("transformer", "vae"):
        change_json(folder / part / "config.json", published[part])
    t5 = T5Config.from_pretrained(folder / "text_encoder_2")
    t5.update({"d_model": published["transformer"]["joint_attention_dim"]})
    T5EncoderModel(t5).save_pretrained(folder / "text_encoder_2")
    clip = CLIPTextConfig.from_pretrained(folder / "text_encoder")
    clip.update({"hidden_size": published["transformer"]["pooled_projection_dim"]})
    CLIPTextModel(clip).save_pretrained(folder / "text_encoder")
    return folder


def change_json(file: Path, values: Mapping[str, Any]) -> None:
    """Set some keys of a JSON object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values, indent=1))


def write_scorer(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """An HPS checkpoint of true size with random weights, and the scorer's options for it."""
    import open_clip

    model = open_clip.create_model(SCORER, load_weights=False, device=device)
    torch.save({"state_dict": model.half().cpu().state_dict()}, path)
    return {"checkpoint": str(path), "architecture": SCORER, "dtype": "float16"}


def random_conditioning(
    family: Family, transformer: Any, tokens: int, dtype: torch.dtype, seed: int = 0
) -> Conditioning:
    """Of a prompt, on the CPU, in the shapes that the family's text encoders give; where it is
    guided by a second pass, with a negative one."""
    generator = torch.Generator().manual_seed(seed)
    blank = family.blank(transformer, tokens, torch.float32, "meta")
    tensors = {
        name: torch.randn(tensor.shape, generator=generator).to(dtype)
        for name, tensor in blank.tensors.items()
    }
    prompt = Conditioning(tensors)
    return replace(prompt, negative=prompt) if family.guidance_kind == "cfg" else prompt


def soft_pictures(count: int, side: int, lightest: float = 1.0) -> Tensor:
    """uint8 ``[count, side, side, 3]``: soft colours that differ, as decoded pictures are; of the
    levels between black and white those in the lightest part."""
    generator = torch.Generator().manual_seed(0)
    coarse = 1 - lightest + lightest * torch.rand(count, 3, 9, 9, generator=generator)
    images = torch.nn.functional.interpolate(coarse, [side, side], mode="bicubic").clamp(0, 1)
    return (255 * images).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def join_alone(device: torch.device) -> None:
    """A process group of this process alone, which a ``LearnerEngine`` needs."""
    # DeepSpeed asks for cards when it is imported: not in a process that is still to fork.
    from g2rpo_ray.learner.engine import join_process_group

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    join_process_group(0, 1, "127.0.0.1", port, 600, device)


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Seconds until the card, where one is used, has finished; and the result."""
    started_s = now_s()
    result = run()
    return now_s() - started_s, result


def now_s() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def median_s(run: Callable[[], object], repeats: int, warm_up: int = 1) -> float:
    """Median seconds of ``run``, after some calls to warm up."""
    for _ in range(warm_up):
        run()
    return median(timed(run)[0] for _ in range(repeats))


def matrix_s(side: int, dtype: torch.dtype, device: torch.device, repeats: int = 10) -> float:
    """Seconds of a square product of ``2 * side**3`` operations, which rates are relative to."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in "ab")
    return median_s(lambda: a @ b, repeats)


def matrix_s_in_a_row(side: int, dtype: torch.dtype, device: torch.device, for_s: float) -> float:
    """``matrix_s`` of one that ``for_s`` of them without a pause went before: a card lowers its
    clock under load."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in "ab")
    out, many, began_s = a @ b, 20, now_s()
    while True:
        seconds, _ = timed(lambda: [torch.mm(a, b, out=out) for _ in range(many)])
        if now_s() - began_s > for_s:
            return seconds / many


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Rows of the same keys as a Markdown table, numbers with four digits."""
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        print("| " + " | ".join(cells) + " |")


def card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def make_parser(description: str | None, needs_file: bool = False) -> argparse.ArgumentParser:
    """Options of a script, from its docstring's first line: so far ``--json``, for its results."""
    # Whoever watches a long run must see how far it came, also through a pipe.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--json", type=program.output, required=needs_file, help="where results go")
    return parser


class FileError(InputError):
    """A file that was given is missing, or not what the script reads."""


def read_json(path: Path, kind: type[T]) -> T:
    """Content of a JSON file, as pydantic makes a ``kind`` of it; keys that it has not are left
    out.

    Raises:
        FileError: it cannot be read, is no JSON, or not of this kind.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first, *more = problems(error)
        others = f" (and {len(more)} more)" if more else ""
        # Of the whole file there is no key.
        what = f"{first.removeprefix(': ')}{others}"
        raise FileError(f"{path}: not what this script reads: {what}") from error


def write_json(path: Path | None, content: object) -> None:
    """Where no file is asked for, nothing."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")
