"""What ``g2rpo score`` reads of a configuration: its rewards, and how they are reached."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from g2rpo_ray.common.section import ConfigError, Section, problems
from g2rpo_ray.config.files import read_settings, with_overrides
from g2rpo_ray.config.operation import ClusterSection
from g2rpo_ray.rewards.registry import SCORERS
from g2rpo_ray.rewards.section import RewardSection

SINGLE = ("prompts.key", "model.deterministic")
"""All that is read of their sections."""


class CaptionsSection(Section):
    """The texts that pictures were made for."""

    key: str | Annotated[int, Field(ge=1)] = "prompt"
    """As ``prompts.key`` of a run."""


class ScoringModelSection(Section):
    """How the models of all scorers compute."""

    deterministic: bool = False
    """As ``model.deterministic`` of a run."""


class ScoringConfig(Section):
    """Sections of a run's configuration that scoring needs; it has no others."""

    rewards: dict[str, RewardSection] = Field(min_length=1)
    cluster: ClusterSection = ClusterSection()
    prompts: CaptionsSection = CaptionsSection()
    model: ScoringModelSection = ScoringModelSection()


def load_scoring(
    path: Path | None, names: Sequence[str], overrides: Sequence[str]
) -> ScoringConfig:
    """Settings of some rewards.

    Args:
        path: a configuration, or the folder of a run; None: there are overrides alone.
        names: rewards of it, or kinds of scorers; empty: all that it has.

    Raises:
        ConfigError: a name is neither, the file cannot be read, or a value is wrong.
    """
    for override in overrides:
        if not override.startswith(("rewards.", "cluster.", *(f"{name}=" for name in SINGLE))):
            raise ConfigError(
                f"override {override.partition('=')[0]!r}: scoring reads rewards.*, cluster.*, "
                f"{' and '.join(SINGLE)} alone"
            )
    file = path / "config.yaml" if path and path.is_dir() else path
    tree = read_settings(file, overrides) if file else with_overrides({}, overrides)
    rewards = tree.get("rewards") or {}
    chosen: dict[str, Any] = {}
    for name in names or rewards:
        chosen[name] = rewards.get(name, {} if name in SCORERS else None)
        if chosen[name] is None:
            raise ConfigError(
                f"--reward {name}: no reward of {file or '--config, which is not given'} "
                f"({', '.join(rewards) or 'none'}) and no kind of scorer ({', '.join(SCORERS)})"
            )
        if name in SCORERS and isinstance(chosen[name], dict):
            chosen[name].setdefault("kind", name)
    if not chosen:
        raise ConfigError(
            "no reward: name kinds of scorers with --reward, or a configuration with --config"
        )
    known = {"rewards": chosen, "cluster": tree.get("cluster", {})}
    for section, key in (name.split(".") for name in SINGLE):
        if isinstance(found := tree.get(section), dict) and key in found:
            known[section] = {key: found[key]}
    try:
        return ScoringConfig.model_validate(known)
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in problems(error))
        raise ConfigError(f"{file or 'overrides'}:\n{lines}") from error
