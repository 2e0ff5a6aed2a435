"""Configuration files: YAML and dotted overrides."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from g2rpo_ray.common.files import cause_of, replace_text
from g2rpo_ray.common.secrets import redacted, secrets_in
from g2rpo_ray.common.section import ConfigError, problems
from g2rpo_ray.config.run import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key.sub=value`` overrides and check everything.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, a value is wrong.
    """
    tree = read_settings(Path(path), overrides)
    keys = ", ".join(dict.fromkeys(override.partition("=")[0] for override in overrides))
    return config_from_dict(tree, source=f"{path}{keys and f' with overrides of {keys}'}")


def read_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The tree of a YAML file with its overrides; errors as of ``load_config``, but of values."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder; a run's settings are in {path}/config.yaml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        remedy = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise ConfigError(f"{path}: cannot be read: {cause_of(error, path)}{remedy}") from error
    tree = _parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: expected settings as 'key: value' lines, found {redacted(repr(tree)):.60}"
        )
    return with_overrides(tree, overrides)


def config_from_dict(tree: dict[str, Any], source: str) -> Config:
    """Check a tree of settings; ``source`` names it in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in problems(error))
        raise ConfigError(f"{source}:\n{lines}") from error


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration, defaults included; ``load_config`` reads it back.

    Whole or not at all: a resumed run writes it anew, perhaps on a disk that is full by now.
    """
    tree = config.model_dump(mode="json")
    replace_text(path, yaml.dump(tree, Dumper=_YamlDumper, sort_keys=False))


class _YamlDumper(yaml.SafeDumper):
    """Quotes what is a number to either version of YAML: ``08`` is text to the first."""


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2 numbers (``1e-4`` is one, ``010`` is ten and ``1:04`` none), and a doubled key is an
    error instead of the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen, problem = set(), ""
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                problem = "a key must be plain text; is this a template that was not filled in?"
            elif key_node.value in seen:
                problem = f"key {key_node.value!r} stands here twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float"))
# YAML 1.1's are octal where they begin with 0, base 60 with colons in them.
_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# The core schema of YAML 1.2.2, section 10.3.2.
for _tag, _pattern in (
    (_INT, r"[-+]?\d+$|0o[0-7]+$|0x[0-9a-fA-F]+$"),
    (_FLOAT, r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
):
    for _class in (_YamlLoader, _YamlDumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), list("-+0123456789."))


def _int(_: _YamlLoader, node: yaml.ScalarNode) -> int:
    base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
    return int(node.value, base)


_YamlLoader.add_constructor(_INT, _int)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        tree = yaml.load(text, _YamlLoader)
        # Aliases can make a tree that holds itself, which has no end.
        json.dumps(tree, default=str, skipkeys=True)
        return tree
    except RecursionError:
        raise ConfigError(f"{source}: too deep: settings within settings within ...") from None
    except (yaml.YAMLError, ValueError) as error:
        # A ValueError: what looks like a date, and is none. Without the line: it may be a secret.
        for mark in (getattr(error, "context_mark", None), getattr(error, "problem_mark", None)):
            if mark is not None:
                mark.buffer = None
        raise ConfigError(f"{source}: not valid YAML: {error}") from error


def with_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tree itself, changed by ``key.sub=value``; raises ConfigError for what is none."""
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    shown = repr(redacted(f"{key}=***" if any(secrets_in({key: text})) else override))
    if not separator or not key:
        raise ConfigError(f"override {shown}: expected key.sub=value")
    *parents, leaf = key.split(".")
    section = tree
    for parent in parents:
        value = section.get(parent)
        if value is None:
            value = section[parent] = {}
        if not isinstance(value, dict):
            raise ConfigError(f"override {shown}: {parent} is no section, but a single value")
        section = value
    section[leaf] = _parse_yaml(text, f"override {shown}")
    for event in yaml.parse(text, _YamlLoader):
        lines = {mark.line for mark in (event.start_mark, event.end_mark) if mark is not None}
        is_folded = isinstance(event, yaml.ScalarEvent) and event.style not in ("|", ">")
        if is_folded and len(lines) > 1:
            raise ConfigError(
                f"override {shown}: a line break inside a value is a blank in YAML; write \\n in "
                f"double quotes: {key}='\"...\\n...\"'"
            )
    node = yaml.compose(text, _YamlLoader)
    if text[node.end_mark.index if node else 0 :].strip():
        # Else a run in '/runs/try #2' would silently be one in '/runs/try'.
        raise ConfigError(
            f"override {shown}: ' #' begins a comment in YAML, what follows would be lost; "
            f"quote the value: {key}='\"...\"'"
        )
