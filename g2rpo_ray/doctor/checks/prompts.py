"""Prompt files, and embeddings beside them, as the driver finds them."""

from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config
from g2rpo_ray.doctor.findings import Finding, fail, ok, warn
from g2rpo_ray.prompts.dataset import (
    check_apart,
    embeddings_of,
    read_config_prompts,
    repeated_words,
)


def check_prompts(config: Config) -> list[Finding]:
    """What a run would refuse at its start, each file on its own."""
    found: list[list[str]] = []
    findings = []
    for name in ("train", "heldout"):
        path = getattr(config.prompts, name)
        try:
            found.append(read_config_prompts(config, path))
            embeddings_of(config, path)
        except InputError as error:
            findings.append(fail("prompts", str(error), f"mend it, or set prompts.{name}"))
    if findings:
        return findings
    try:
        check_apart(*found)
    except InputError as error:
        return [fail("prompts", str(error), "use other prompts.heldout")]
    if repeated := repeated_words(config, len(found[0])):
        return [warn("prompts", repeated, "add prompts, or lower sampling.prompts_per_iteration")]
    return [ok("prompts", "{} to train on, {} held out".format(*map(len, found)))]
