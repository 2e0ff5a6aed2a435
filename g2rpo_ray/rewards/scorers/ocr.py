"""How well a picture shows the text that its prompt asks for, read by PP-OCR on ONNX Runtime."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import MissingPackageError, RewardScorer, ScorerError, wanted_of
from g2rpo_ray.rewards.scorers.written_text import comparable, similarity, wanted_texts

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

DETECTOR, RECOGNISER = "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx"
"""What rapidocr's wheel holds."""
THINNEST = 60
"""Sides' ratio, above which rapidocr's own resizing would leave nothing."""


class OcrScorer(RewardScorer):
    """0 to 1: 1 where every wanted text stands in the picture, see ``similarity``. On the CPU, in
    as many threads as torch has: ``rewards.<name>.threads``."""

    class Options(Section):
        field: str | None = None
        """Key of the prompt file that holds the text, or a list of texts; none: what stands in
        double quotes in the prompt."""
        recogniser: str | None = None
        """ONNX file of another PP-OCR recognition model, for scripts that rapidocr's own lacks."""
        side: int = Field(736, ge=32)
        """Longer side, in pixels, that pictures have where text is looked for; what is found is cut
        from the picture at its own size. Smaller pictures are made as large."""

    kind = "ocr"

    @classmethod
    def check_files(cls, options: Options) -> None:
        _model_files(options)

    @classmethod
    def check_prompt(cls, options: Options, prompt: str) -> None:
        wanted_texts(prompt, options.field)

    def __init__(self, options: Options, device: str) -> None:  # noqa: ARG002
        import torch

        detector, recogniser = _model_files(options)
        self._field, self._side = options.field, options.side
        # Now: torch's number belongs to the thread that sets it.
        self._threads = torch.get_num_threads()
        try:
            self._engine, characters = _load(detector, recogniser, options.side)
        # Whatever a file that is no ONNX model makes the library raise.
        except Exception as error:
            raise ScorerError(
                f"{recogniser}: cannot be loaded as a PP-OCR recognition model: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._known = set("".join(map(comparable, characters)))

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        wanted = wanted_of(prompts, self._wanted)
        asked = [place for place, texts in enumerate(wanted) if texts is not None]
        with ThreadPoolExecutor(self._threads) as pool:
            read = pool.map(self._read, [pictures[place].numpy() for place in asked])
        scores = torch.full((len(pictures),), torch.nan)
        for place, lines in zip(asked, read, strict=True):
            scores[place] = similarity(wanted[place] or [], lines)
        return scores

    def _wanted(self, prompt: str) -> list[str]:
        texts = [comparable(text) for text in wanted_texts(prompt, self._field)]
        lacking = {c for c in "".join(texts) if c not in self._known}
        letters = sorted(c for c in lacking if unicodedata.category(c).startswith("L"))
        readable = ["".join(c for c in text if c not in lacking) for text in texts]
        if letters or not any(readable):
            raise ScorerError(
                f"prompt {prompt!r:.80}: the recognition model has no {''.join(letters)!r:.40}; "
                "rewards.<name>.options.recogniser takes one for that script"
            )
        return [text for text in readable if text]

    def _read(self, picture: np.ndarray) -> list[str]:
        """Lines of uint8 ``[H, W, 3]`` in reading order, ``comparable``."""
        import numpy as np
        from PIL import Image

        height, width = picture.shape[:2]
        if max(height, width) > THINNEST * min(height, width):
            raise ScorerError(
                f"a picture of {width}x{height} pixels cannot be read: one side is more than "
                f"{THINNEST} times the other"
            )
        scale = self._side / max(height, width)
        if scale > 1:
            size = max(1, round(width * scale)), max(1, round(height * scale))
            picture = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
        found = self._engine(np.ascontiguousarray(picture[..., ::-1]))
        return [comparable(line) for line in found.txts or ()]


def _model_files(options: OcrScorer.Options) -> tuple[Path, Path]:
    try:
        import onnxruntime  # noqa: F401
        import rapidocr
    except ImportError as error:
        raise MissingPackageError(
            f"kind ocr needs the packages rapidocr and onnxruntime: pip install 'g2rpo-ray[ocr]' "
            f"({error})"
        ) from error
    models = Path(rapidocr.__file__).parent / "models"
    own = resolve_path(options.recogniser) if options.recogniser else None
    files = models / DETECTOR, own or models / RECOGNISER
    for file in files:
        if not file.is_file():
            raise ScorerError(f"{file}: no such file; rapidocr 3.10 and later bring their own")
    return files


def _load(detector: Path, recogniser: Path, side: int) -> tuple[Any, list[str]]:
    """RapidOCR, and the characters that its recognition model knows."""
    from rapidocr import RapidOCR

    engine = RapidOCR(
        params={
            "Global.log_level": "error",
            # As Flow-GRPO: no model of its own turns what stands on its head.
            "Global.use_cls": False,
            # By their paths: without these a file that is missing would be downloaded.
            "Det.model_path": str(detector),
            "Rec.model_path": str(recogniser),
            "Det.limit_type": "max",
            "Det.limit_side_len": side,
            # Each picture has a thread of its own, which is faster than several for one.
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )
    # Loaded at the first picture otherwise, when a damaged file would be that picture's failure.
    engine._load_det_model()
    return engine, engine._load_rec_model().postprocess_op.character
