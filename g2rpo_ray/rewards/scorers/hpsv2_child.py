"""Runs in the environment of hpsv2, as a script: it imports nothing of this package.

Its argument is JSON: checkpoint, architecture, config, device. It says ``{"ready": true}``, then
each request (a line of JSON with shape and prompts, and the pictures' bytes) by scores or an error.
"""

import json
import os
import sys
from functools import lru_cache
from typing import Any


def main() -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    try:
        score = load(**settings)
        reply: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001  (told to the other side)
        score, reply = None, {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), file=answers, flush=True)
    while score is not None and (line := sys.stdin.buffer.readline()):
        request = json.loads(line)
        batch, height, width, channels = request["shape"]
        data = sys.stdin.buffer.read(batch * height * width * channels)
        try:
            reply = {"scores": score(data, request["shape"], request["prompts"])}
        except Exception as error:  # noqa: BLE001  (told to the other side)
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


def load(checkpoint: str, architecture: str, config: str | None, device: str) -> Any:
    """hpsv2's own ``score`` on a checkpoint, without the download of weights that it replaces."""
    import numpy
    import torch
    from hpsv2 import img_score
    from hpsv2.src import open_clip
    from PIL import Image

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
