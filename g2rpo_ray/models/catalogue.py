"""Which models a configuration names, and where on the hub they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.paths import is_shipped, resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.models.families import FAMILIES
from g2rpo_ray.rewards.registry import SCORERS, check_files
from g2rpo_ray.rewards.scorer import MissingPackageError, ScorerError
from g2rpo_ray.rewards.scorers.endpoint import EndpointOptions


class DownloadError(InputError):
    """A model cannot be fetched; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Source:
    """A model on the hub."""

    repo: str
    patterns: Sequence[str]
    """Files that are used, with ``*`` and ``?``."""
    revision: str | None = None
    """Commit. None: the branch ``main`` as it is at the first download, and that commit from then
    on (it is written down beside the files)."""
    one_of: Sequence[str] = ()
    """Of these files the first that there is: the same weights in several formats."""
    terms: str = ""
    """What must be accepted before the hub gives it out."""
    licence: Mapping[str, str] = field(default_factory=dict)
    """What the card of a model trained from it says of its licence, by the hub's keys."""

    def wanted(self, files: Sequence[str]) -> list[str]:
        """The files of the repository that are used."""
        names = [f for f in files if any(fnmatchcase(f, pattern) for pattern in self.patterns)]
        return sorted(names + [file for file in self.one_of if file in files][:1])


@dataclass(frozen=True)
class Target:
    """A folder or file that a configuration expects."""

    setting: str
    """The setting that names it."""
    path: Path
    source: Source | None
    """None: not in the catalogue."""

    @property
    def folder(self) -> Path:
        """Where the repository's files go; a target of one file lies in it under its own name."""
        return self.path.parent if self.is_file else self.path

    @property
    def is_file(self) -> bool:
        return self.source is not None and self.source.patterns == [self.path.name]


CATALOGUE: dict[str, Source] = {
    name: Source(
        model.repo,
        # Not the single-file copies of transformer and VAE beside them.
        ["model_index.json", "scheduler/*", *(f"{part}/*" for part in sorted(family.parts))],
        model.revision,
        terms=model.terms,
        licence=model.licence,
    )
    for family in FAMILIES
    for name, model in family.published.items()
}
CATALOGUE |= {
    name: Source(**entry)
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
"""Source by the name of the folder or file that it goes to."""


def targets_of(config: Config, also: Sequence[str] = ()) -> list[Target]:
    """Everything that a configuration expects on the disk and the package does not hold itself.

    Args:
        also: further folders or files, by a path that ends in a name of the catalogue.

    Raises:
        DownloadError: a name in ``also`` is not in the catalogue.
    """
    for name in also:
        if Path(name).name not in CATALOGUE:
            raise DownloadError(
                f"--also {name}: not known; its last part must be one of {', '.join(CATALOGUE)}"
            )
    named = [("model.path", config.model.path), *reward_paths(config)]
    named += [("--also", name) for name in also]
    targets: dict[Path, Target] = {}
    for setting, value in named:
        path = resolve_path(value)
        targets.setdefault(path, Target(setting, path, CATALOGUE.get(path.name)))
    return [target for target in targets.values() if not is_shipped(target.path)]


def check_rewards(config: Config) -> None:
    """Look at the scorers' files before anything starts; see ``reward_problems``.

    Raises:
        ScorerError: some cannot be used.
    """
    if problems := list(reward_problems(config)):
        raise ScorerError("; ".join(problems))


def reward_problems(config: Config) -> Iterator[str]:
    """Of rewards whose files lie on this machine; another's may lie where their replicas run."""
    for name, reward in config.rewards.items():
        begin = f"rewards.{name}.options."
        paths = [resolve_path(p) for key, p in reward_paths(config) if key.startswith(begin)]
        # A look at files may take libraries that the driver does without.
        if any(not path.exists() for path in paths) or (paths and all(map(is_shipped, paths))):
            continue
        try:
            check_files(reward.kind, reward.options)
        except MissingPackageError as error:
            # Replicas of an environment of their own may have it.
            if not reward.runtime_env.keys() - {"env_vars"}:
                yield f"rewards.{name}: {error}"
        except ScorerError as error:
            yield f"rewards.{name}: {error}"


def absent_files(config: Config) -> list[str]:
    """In words, files of rewards that are not on this machine; another's may lie where their
    replicas run."""
    paths = ((setting, resolve_path(path)) for setting, path in reward_paths(config))
    return [f"{setting}: {path} is not there" for setting, path in paths if not path.exists()]


def reward_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Setting and value of every option of a scorer that names a file or folder."""
    for name, reward in config.rewards.items():
        for option, value in reward.options.items():
            if not isinstance(value, str):
                continue
            path = value.removeprefix("local-dir:")
            if issubclass(SCORERS[reward.kind].Options, EndpointOptions):
                # A model's name with the endpoint, or words for a judge, may look like paths.
                is_path = option == "ca_file"
            else:
                # An architecture's or module's name is no path.
                looks_like_one = "/" in path or path.endswith((".pt", ".pth", ".safetensors"))
                is_path = (
                    path != value
                    or Path(path).name in CATALOGUE
                    or (looks_like_one and "://" not in path)
                )
            if is_path:
                yield f"rewards.{name}.options.{option}", path
