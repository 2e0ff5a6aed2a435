"""HPS-v2 / v2.1 by the hpsv2 package's own code, in a Python environment of its own.

It scores picture by picture and is many times slower than ``hps``, which gives the same numbers.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers.isolated import ScorerProcess


class Hpsv2Scorer(RewardScorer):
    """``hpsv2.img_score.score``, asked through a child process."""

    class Options(Section):
        """Settings of the ``hpsv2`` scorer."""

        python: str
        """The environment's Python; ``python -m g2rpo_ray.rewards.scorers.isolated hpsv2 FOLDER``
        makes the environment and prints this path."""
        checkpoint: str
        """``HPS_v2.1_compressed.pt`` or another file of ``{'state_dict': ...}``."""
        architecture: str = "ViT-H-14"
        """Name of a model that hpsv2 knows."""
        architecture_config: str | None = None
        """JSON file of another model, named ``<architecture>.json``."""
        timeout_s: float = Field(600.0, gt=0)
        """Longest wait for the process to load, and for an answer."""

    kind = "hpsv2"

    def __init__(self, options: Section, device: str) -> None:
        assert isinstance(options, self.Options)
        checkpoint = resolve_path(options.checkpoint)
        if not checkpoint.is_file():
            raise ScorerError(f"{checkpoint}: no such checkpoint file")
        config = options.architecture_config
        settings = {
            "checkpoint": str(checkpoint),
            "architecture": options.architecture,
            "config": None if config is None else str(resolve_path(config)),
            "device": device,
        }
        # Not resolved: a virtual environment's Python is a link, and is known by where it lies.
        python = Path(options.python).absolute()
        script = Path(__file__).with_name("hpsv2_child.py")
        self._process = ScorerProcess(python, script, settings, options.timeout_s)

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        answer = self._process.ask({"prompts": list(prompts)}, pictures)
        return torch.tensor(answer["scores"], dtype=torch.float32)
