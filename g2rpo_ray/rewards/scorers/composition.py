"""Whether a picture holds the objects that its prompt asks for, in number, colour and place."""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor

from pydantic import Field

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.prompt_text import metadata_of
from g2rpo_ray.rewards.scorer import RewardScorer, Tensor, wanted_of
from g2rpo_ray.rewards.scorers.clip import ClipOptions
from g2rpo_ray.rewards.scorers.composition_checks import (
    COLOURS,
    Box,
    Composition,
    checks,
    read_composition,
)

COLOUR_TEXTS = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
COUNTING = "counting"
"""GenEval's tag of prompts that ask for a number."""


class CompositionScorer(RewardScorer):
    """0 to 1: the mean of the prompt's checks; or, ``strict``, whether all hold. What to look for
    is in a prompt's metadata, as in GenEval's jsonl: ``include``, ``exclude``, ``tag``."""

    class Options(ClipOptions):
        detector: str
        """Folder of a transformers OWLv2 model, such as owlv2-base-patch16-ensemble."""
        clip: str
        """``local-dir:FOLDER`` of the open_clip model that names colours, or an open_clip name."""
        clip_checkpoint: str | None = None
        """Weights file; needed with an open_clip name, else the folder's own are taken."""
        strict: bool = False
        """1 where all is right, else 0, as GenEval counts; else the mean of the checks."""
        threshold: float = Field(0.2, ge=0, le=1)
        """Least confidence of an object."""
        counting_threshold: float = Field(0.3, ge=0, le=1)
        """The same where the prompt's ``tag`` is ``counting``."""
        max_overlap: float = Field(0.5, ge=0, le=1)
        """Intersection over union above which two boxes of a class are one object."""

    kind = "composition"

    @classmethod
    def check_files(cls, options: Options) -> None:
        from g2rpo_ray.rewards.scorers.open_clip_model import find_open_clip
        from g2rpo_ray.rewards.scorers.owlv2 import MODEL
        from g2rpo_ray.rewards.scorers.pretrained import check_pretrained, read_tokenizer

        read_tokenizer(resolve_path(options.detector), MODEL)
        check_pretrained(resolve_path(options.detector))
        find_open_clip(options.clip, options.clip_checkpoint)

    @classmethod
    def check_prompt(cls, options: Options, prompt: str) -> None:  # noqa: ARG003
        read_composition(prompt)

    def __init__(self, options: Options, device: str) -> None:
        from g2rpo_ray.rewards.scorers.clip_features import DTYPES
        from g2rpo_ray.rewards.scorers.open_clip_model import load_clip_features
        from g2rpo_ray.rewards.scorers.owlv2 import Owlv2Detector

        self._options = options
        self._detector = Owlv2Detector(
            resolve_path(options.detector), device, DTYPES[options.dtype]
        )
        self._clip = load_clip_features(
            options.clip, options.clip_checkpoint, device, options.dtype
        )

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        import torch

        wanted = wanted_of(prompts, self._wanted)
        asked = [(place, it) for place, it in enumerate(wanted) if it is not None]
        found = self._detector.detect(
            pictures[[place for place, _ in asked]],
            [it.classes for _, it in asked],
            [self._threshold(prompts[place]) for place, _ in asked],
            self._options.max_overlap,
        )
        colours = self._colours(
            (pictures[place], clause.name, box)
            for (place, it), objects in zip(asked, found, strict=True)
            for clause in it.include
            if clause.color is not None
            for box in objects[clause.name][: clause.count]
        )
        scores = torch.full((len(pictures),), torch.nan)
        for (place, it), objects in zip(asked, found, strict=True):
            results = checks(it, objects, colours)
            whole = float(min(results) == 1)
            scores[place] = whole if self._options.strict else sum(results) / len(results)
        return scores

    def _wanted(self, prompt: str) -> Composition:
        composition = read_composition(prompt)
        for name in composition.classes:
            self._detector.embedded(name)
        return composition

    def _threshold(self, prompt: str) -> float:
        counts = metadata_of(prompt).get("tag") == COUNTING
        return self._options.counting_threshold if counts else self._options.threshold

    def _colours(self, seen: Iterable[tuple[Tensor, str, Box]]) -> Iterator[str]:
        """The colour, under CLIP, of what a picture has in each box of a class, in their order."""
        import torch

        crops, names = [], []
        for picture, name, (left, top, right, bottom) in seen:
            crops.append(picture[floor(top) : ceil(bottom), floor(left) : ceil(right)])
            names.append(name)
        if not crops:
            return iter(())
        with torch.inference_mode():
            texts = self._colour_texts(names)
            likeness = torch.einsum("bd,bcd->bc", self._clip.crops(crops), texts)
        return iter([COLOURS[place] for place in likeness.argmax(-1).tolist()])

    def _colour_texts(self, names: Sequence[str]) -> Tensor:
        """``[B, colours, D]``: each colour of a class is the mean of its texts, as in GenEval."""
        import torch

        texts = [
            self._clip.text([text.format(colour, name) for text in COLOUR_TEXTS]).mean(0)
            for name in names
            for colour in COLOURS
        ]
        return torch.nn.functional.normalize(torch.stack(texts), dim=-1).unflatten(
            0, (len(names), len(COLOURS))
        )
