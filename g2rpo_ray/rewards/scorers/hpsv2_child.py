"""Runs in the environment of hpsv2, as a script: it imports nothing of this package.

Its arguments are JSON (checkpoint, architecture, config, device, deterministic) and a pipe's
descriptor. It says ``{"ready": true}``, then answers each request (the pictures' bytes, shape,
prompts) by scores or an error, all in JSON.
"""

import json
import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    pipe = Connection(int(sys.argv[2]))
    try:
        score = load(**json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001  (told to the other side)
        _say(pipe, error=f"{type(error).__name__}: {error}")
        return
    _say(pipe, ready=True)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            _say(pipe, scores=score(*request))
        except Exception as error:  # noqa: BLE001  (told to the other side)
            _say(pipe, error=f"{type(error).__name__}: {error}")


def _say(pipe: Connection, **answer: Any) -> None:
    pipe.send_bytes(json.dumps(answer).encode())


def load(
    checkpoint: str, architecture: str, config: str | None, device: str, deterministic: bool
) -> Any:
    """hpsv2's own ``score`` on a checkpoint, without the download of weights that it replaces."""
    import numpy
    import torch
    from hpsv2 import img_score
    from hpsv2.src import open_clip
    from PIL import Image

    torch.backends.cudnn.deterministic = deterministic
    if config is not None:
        open_clip.add_model_config(config)
    # It reads the file at every call.
    torch.load = lru_cache(maxsize=1)(torch.load)  # type: ignore[assignment]
    img_score.device = device
    model, _, preprocess = open_clip.create_model_and_transforms(
        architecture, None, precision="amp", device=device, light_augmentation=True,
        output_dict=True,
    )  # fmt: skip
    img_score.model_dict.update(model=model, preprocess_val=preprocess)

    def score(data: bytes, shape: list[int], prompts: list[str]) -> list[float]:
        pictures = numpy.frombuffer(data, numpy.uint8).reshape(shape)
        return [
            float(img_score.score(Image.fromarray(picture), prompt, cp=checkpoint)[0])
            for picture, prompt in zip(pictures, prompts, strict=True)
        ]

    return score


if __name__ == "__main__":
    main()
