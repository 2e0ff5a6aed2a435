"""What the training stages share: the loop, mixed precision, how weights are written."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def fit(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    steps: int,
    batch_loss: Callable[[], Tensor],
    after_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Descend ``batch_loss()``, the gradient's norm clipped at 1; print ten losses on the way.

    Raises:
        RuntimeError: one of them is not finite.
    """
    start_s = time.monotonic()
    for step in range(steps):
        loss = batch_loss()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        after_step(step)
        # Reading the loss from the device in each step would cost time.
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            seconds = time.monotonic() - start_s
            print(f"{name} step {step}/{steps} loss {loss.item():.4f} {seconds:.1f} s")
            if not loss.isfinite():
                raise RuntimeError(f"{name}: the loss is {loss.item()} at step {step}")


def half_precision(device: torch.device, wanted: bool = True) -> AbstractContextManager[None]:
    """bfloat16 products on a GPU; on the CPU they would be slower than float32."""
    on = wanted and device.type == "cuda"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=on)


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
