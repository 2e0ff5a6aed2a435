"""The files that roles load: all there, whole, and the same on every node."""

import hashlib
import json
from pathlib import Path

from g2rpo_ray.common.files import sha256_of_file
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.models.catalogue import reward_paths
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.loading import check_model

SUMS = "SHA256SUMS"
"""Written by ``sha256sum``; files named in it are checked in full where it lies in the folder."""
SAMPLE_BYTES = 1 << 20


def model_problems(config: Config) -> list[str]:
    """What is missing or broken of the model and of the rewards' files."""
    try:
        folder = check_model(config)
    except ModelFolderError as error:
        return [str(error), *_reward_problems(config)]
    return [*_missing_shards(folder), *_wrong_sums(folder), *_reward_problems(config)]


def digests(config: Config) -> dict[str, str]:
    """Digest of each file's size, beginning and end, by name: what differs is another file."""
    roots = [resolve_path(config.model.path), *_reward_paths(config).values()]
    found = {}
    for root in roots:
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for file in (file for file in files if file.is_file()):
            found[str(file.relative_to(root.parent))] = _sampled_digest(file)
    return found


def _missing_shards(folder: Path) -> list[str]:
    problems = []
    for part in open_family(folder).parts:
        for index in sorted((folder / part).glob("*.safetensors.index.json")):
            try:
                shards = set(json.loads(index.read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError) as error:
                problems.append(f"{index}: not readable as an index of shards: {error!r}")
                continue
            missing = sorted(name for name in shards if not (index.parent / name).is_file())
            if missing:
                problems.append(f"{index.parent}: {len(missing)} of {len(shards)} shards are "
                                f"missing, first {missing[0]}")  # fmt: skip
    return problems


def _wrong_sums(folder: Path) -> list[str]:
    problems = []
    for sums in sorted(folder.rglob(SUMS)):
        for line in sums.read_text().splitlines():
            expected, _, name = line.partition(" ")
            file = sums.parent / name.lstrip(" *")
            if not file.is_file():
                problems.append(f"{file}: named in {sums}, but missing")
            elif sha256_of_file(file) != expected:
                problems.append(f"{file}: its checksum is not the one in {sums}")
    return problems


def _reward_problems(config: Config) -> list[str]:
    return [
        f"{setting}: {path} is not there"
        for setting, path in _reward_paths(config).items()
        if not path.exists()
    ]


def _reward_paths(config: Config) -> dict[str, Path]:
    return {setting: resolve_path(path) for setting, path in reward_paths(config)}


def _sampled_digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(SAMPLE_BYTES))
        stream.seek(max(0, size - SAMPLE_BYTES))
        digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
