"""What the training stages share: progress lines, mixed precision, half-precision files."""

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class Progress:
    """Prints a loss now and then; reading it from the device each step would cost time."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.start = name, steps, time.monotonic()

    def show(self, step: int, loss: Tensor) -> None:
        if step % max(1, self.steps // 10) == 0 or step == self.steps - 1:
            seconds = time.monotonic() - self.start
            print(f"{self.name} step {step}/{self.steps} loss {loss.item():.4f} {seconds:.1f} s")


def half_precision(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 products on a GPU; on the CPU they would be slower than float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class Saveable(Protocol):
    """A model of diffusers or transformers."""

    def half(self) -> "Saveable": ...
    def float(self) -> "Saveable": ...
    def save_pretrained(self, folder: Path) -> None: ...


def save_half(model: Saveable, folder: Path) -> None:
    """Write float16 safetensors that load as float32 unless asked otherwise.

    transformers takes the dtype of a plain `from_pretrained` from the configuration; on a CPU
    float16 would be slow and coarse, so the configuration says float32.
    """
    model.half().save_pretrained(folder)
    model.float()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("_name_or_path", None)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")
