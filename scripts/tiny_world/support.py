"""What the training stages share: mixed precision, how weights are written."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch


def half_precision(device: torch.device, wanted: bool) -> AbstractContextManager[None]:
    """bfloat16 products, if they are wanted."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=wanted)


def save_half(model: Any, folder: Path) -> None:
    """Write a model of diffusers or transformers as float16 that loads as float32.

    transformers takes the dtype of a plain `from_pretrained` from the configuration; on a CPU
    float16 would be slow and coarse, so the configuration says float32.
    """
    model.half().save_pretrained(folder)
    model.float()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("_name_or_path", None)
    config |= dict.fromkeys(config.keys() & {"dtype", "torch_dtype"}, "float32")
    path.write_text(json.dumps(config, indent=2) + "\n")
