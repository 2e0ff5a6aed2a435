"""A user's own scorer: any importable RewardScorer class."""

import importlib
from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from g2rpo_ray.common.section import Section
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError, Tensor


class PythonScorer(RewardScorer):
    """Runs ``module:Class`` with the options given for it."""

    class Options(Section):
        target: str = Field(pattern=r"^[\w.]+:\w+$")
        """``module:Class``; the class is a RewardScorer, importable where the replica runs."""
        options: dict[str, Any] = Field(default_factory=dict)
        """Checked by the class's own ``Options``."""

    kind = "python"

    def __init__(self, options: Options, device: str) -> None:
        where = f"python scorer {options.target!r}"
        module_name, _, class_name = options.target.partition(":")
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ScorerError(f"{where} cannot be imported: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, RewardScorer)):
            raise ScorerError(f"{where} is no subclass of {RewardScorer.__module__}.RewardScorer")
        try:
            own_options = cls.Options.model_validate(options.options)
        except ValidationError as error:
            raise ScorerError(f"{where}: its options: {error}") from error
        self._scorer = cls(own_options, device)
        self.compares_pictures = self._scorer.compares_pictures
        self.reads_prompts = self._scorer.reads_prompts

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        return self._scorer.score(pictures, prompts)
