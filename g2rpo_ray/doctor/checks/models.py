"""Model and reward files on every node: complete, whole, the same."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ray.actor import ActorHandle

from g2rpo_ray.common.files import files_under, sha256_of_file
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import Config
from g2rpo_ray.doctor.findings import Finding, fail, ok
from g2rpo_ray.doctor.probe import ask
from g2rpo_ray.models.catalogue import absent_files, reward_paths, reward_problems
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.fingerprint import sampled
from g2rpo_ray.models.loading import check_model

SUMS = "SHA256SUMS"
"""Written by ``sha256sum``; files named in it are checked in full where it lies in the folder."""
REMEDY = "copy or mount the folder on that node, and copy broken files again"


def check_models(config: Config, probes: Mapping[str, ActorHandle]) -> list[Finding]:
    """What each node would load."""
    problems, findings = ask(probes, "models", REMEDY, model_problems, config)
    findings += [
        fail("models", f"{node}: {problem}", REMEDY)
        for node, found in problems.items()
        for problem in found
    ]
    whole = {node: probes[node] for node, found in problems.items() if not found}
    alike, unread = ask(whole, "models", REMEDY, digests, config)
    return findings + unread + judge_digests(alike)


def judge_digests(found: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Of each node's digests, by file."""
    if not found:
        return []
    (first, *others) = found
    findings = []
    for node in others:
        here, there = found[first], found[node]
        differing = sorted(f for f in here.keys() | there.keys() if here.get(f) != there.get(f))
        if differing:
            what = f"{node} has other files than {first}: {', '.join(differing[:3])}"
            findings.append(fail("models", what, REMEDY))
    count = len(found[first])
    return findings or [ok("models", f"{count} files, whole and alike on {len(found)} nodes")]


def model_problems(config: Config) -> list[str]:
    """What is missing or broken of the model and of the rewards' files."""
    absent = [*absent_files(config), *reward_problems(config)]
    try:
        folder = check_model(config)
    except ModelFolderError as error:
        return [str(error), *absent]
    return [*_wrong_sums(folder), *absent]


def digests(config: Config) -> dict[str, str]:
    """Digest of each file's size and samples, by name: what differs is another file."""
    roots = [resolve_path(config.model.path), *_reward_paths(config).values()]
    found = {}
    for root in roots:
        files = [root / name for name in files_under(root)] if root.is_dir() else [root]
        for file in files:
            content = f"{file.stat().st_size} ".encode() + sampled(file)
            found[str(file.relative_to(root.parent))] = hashlib.sha256(content).hexdigest()[:16]
    return found


def _wrong_sums(folder: Path) -> list[str]:
    problems = []
    for sums in (folder / name for name in files_under(folder) if name.name == SUMS):
        for line in sums.read_text("utf-8", "surrogateescape").splitlines():
            expected, _, name = line.partition(" ")
            file = sums.parent / name.lstrip(" *")
            if not file.is_file():
                problems.append(f"{file}: named in {sums}, but missing")
            elif sha256_of_file(file) != expected:
                problems.append(f"{file}: its checksum is not the one in {sums}")
    return problems


def _reward_paths(config: Config) -> dict[str, Path]:
    return {setting: resolve_path(path) for setting, path in reward_paths(config)}
