"""OWLv2 (arXiv 2306.09683): finds objects of any class that a text names."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo_ray.rewards.scorer import ScorerError
from g2rpo_ray.rewards.scorers.composition_checks import Box
from g2rpo_ray.rewards.scorers.pretrained import load_pretrained, read_tokenizer

MODEL = "Owlv2ForObjectDetection"
QUERY = "a photo of a {}"
"""What the published models are asked with."""
CACHED_CLASSES = 4096
MAX_OBJECTS = 16
"""Of a class in a picture, as GenEval's."""


class Owlv2Detector:
    """Boxes of named classes."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        """Raises ScorerError, see ``read_tokenizer`` and ``load_pretrained``."""
        from transformers import Owlv2ImageProcessor

        self._tokenizer = read_tokenizer(folder, MODEL)
        self._model: Any = load_pretrained(folder, MODEL).to(device, dtype)
        self._processor: Any = Owlv2ImageProcessor.from_pretrained(folder, local_files_only=True)
        self._device, self._dtype, self._folder = torch.device(device), dtype, folder
        self.embedded = lru_cache(CACHED_CLASSES)(self._embedded)

    @torch.inference_mode()
    def _embedded(self, name: str) -> Tensor:
        """A class as the detector compares it: ``[D]``.

        Raises:
            ScorerError: its name is longer than the detector reads.
        """
        length = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer([QUERY.format(name)], padding="max_length", max_length=length)
        if len(tokens.input_ids[0]) > length:
            raise ScorerError(
                f"{self._folder}: the detector does not know the class {name!r:.80}: it has "
                f"{len(tokens.input_ids[0])} tokens with {QUERY.format('')!r} before it, and "
                f"{length} are read"
            )
        ids, mask = (
            torch.tensor(tokens[key], device=self._device)
            for key in ("input_ids", "attention_mask")
        )
        features: Tensor = self._model.owlv2.get_text_features(ids, mask).pooler_output[0]
        return features

    @torch.inference_mode()
    def detect(
        self,
        pictures: Tensor,
        classes: Sequence[Sequence[str]],
        thresholds: Sequence[float],
        max_overlap: float,
    ) -> list[dict[str, list[Box]]]:
        """
        Args:
            pictures: uint8 ``[B, H, W, 3]`` on the CPU.
            classes: of each picture, those to look for; a box is of the one that fits it best.
            thresholds: of each picture, the least confidence.
            max_overlap: of two boxes of a class with a larger intersection over union, the less
                confident one is dropped.

        Returns:
            For each picture its boxes by class, the most confident first, at most MAX_OBJECTS.
        """
        images = [picture.to(self._device).permute(2, 0, 1) for picture in pictures]
        values = self._processor(images=images, return_tensors="pt").pixel_values.to(self._dtype)
        maps, _ = self._model.image_embedder(values)
        features = maps.flatten(1, 2)
        boxes = self._corners(self._model.box_predictor(features, maps), pictures.shape[1:3])
        found = []
        for place, names in enumerate(classes):
            queries = torch.stack([self.embedded(name) for name in names])
            logits, _ = self._model.class_predictor(features[place : place + 1], queries[None])
            scores, best = logits[0].float().sigmoid().max(-1)
            kept = (scores > thresholds[place]) & (boxes[place][:, 2:] > boxes[place][:, :2]).all(
                -1
            )
            found.append(
                {
                    name: _distinct(boxes[place][kept & (best == n)],
                                    scores[kept & (best == n)], max_overlap)
                    for n, name in enumerate(names)
                }
            )  # fmt: skip
        return found

    def _corners(self, boxes: Tensor, size: Sequence[int]) -> Tensor:
        """Centres and sizes, as shares of the padded square, to pixels of the picture itself."""
        height, width = size
        centre, extent = (boxes.float() * max(height, width)).split(2, dim=-1)
        limit = torch.tensor([width, height], device=boxes.device)
        ends = [(centre + part * extent / 2).clamp(min=0) for part in (-1, 1)]
        return torch.cat([torch.minimum(end, limit) for end in ends], dim=-1)


def _distinct(boxes: Tensor, scores: Tensor, max_overlap: float) -> list[Box]:
    from torchvision.ops import nms

    # One order for equal scores, whatever the device does.
    order = scores.argsort(descending=True, stable=True)
    kept = order[nms(boxes[order], scores[order], max_overlap)][:MAX_OBJECTS]
    return [tuple(box) for box in boxes[kept].tolist()]
