"""Aesthetic score: a linear or MLP head on CLIP's image features; it reads no prompt."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.rewards.scorer import ScorerError, Tensor
from g2rpo_ray.rewards.scorers.clip import ClipScorer


class AestheticScorer(ClipScorer):
    """LAION's predictors: about 1 to 10, higher is prettier."""

    class Options(ClipScorer.Options):
        head: str
        """Weights of the head: one linear layer (``weight``, ``bias``), or several by number
        (``layers.0.weight``, ...) with nothing but dropout between them, as LAION's MLP. LAION's
        heads belong to ``ViT-L-14-quickgelu`` with OpenAI's weights."""

    kind = "aesthetic"
    reads_prompts = False

    @classmethod
    def check_files(cls, options: Any) -> None:
        super().check_files(options)
        read_head(resolve_path(options.head))

    def __init__(self, options: Options, device: str) -> None:
        super().__init__(options, device)
        self._head = resolve_path(options.head)
        self._layers = [(w.to(device), b.to(device)) for w, b in read_head(self._head)]

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        from torch.nn.functional import linear

        values = self._features.image(pictures)
        width = self._layers[0][0].shape[1]
        if values.shape[1] != width:
            raise ScorerError(
                f"{self._head}: the head takes {width} features, CLIP gives {values.shape[1]}; "
                "head and architecture do not belong together"
            )
        for weight, bias in self._layers:
            values = linear(values, weight, bias)
        return values.squeeze(-1).cpu()


def read_head(file: Path) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of every linear layer, in order, float32.

    Raises:
        ScorerError: damaged, quantised, other tensors than linear layers, or they do not follow
            each other.
    """
    from g2rpo_ray.rewards.scorers.checkpoint_file import load_state_dict, refuse_quantised

    state = load_state_dict(file)
    refuse_quantised(file, state)
    places: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(?:(?:\w+\.)*?(\d+)\.)?(weight|bias)", name)
        if match is None:
            raise ScorerError(f"{file}: unexpected tensor {name!r}; expected linear layers only")
        places.setdefault(int(match[1] or 0), {})[match[2]] = tensor.float()
    width, layers = None, []
    for number, layer in sorted(places.items()):
        if layer.keys() != {"weight", "bias"} or layer["weight"].ndim != 2:
            raise ScorerError(f"{file}: layer {number} is no linear layer of weight and bias")
        weight, bias = layer["weight"], layer["bias"]
        if bias.shape != weight.shape[:1] or (width is not None and weight.shape[1] != width):
            raise ScorerError(
                f"{file}: layer {number} has weight {list(weight.shape)} and bias "
                f"{list(bias.shape)} after a layer of {width} outputs"
            )
        layers.append((weight, bias))
        width = weight.shape[0]
    if width != 1:
        raise ScorerError(f"{file}: the last layer gives {width} numbers; expected 1")
    return layers
