"""What looks like a secret, in settings and in text; without other imports, for ``submit.py``."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "_KEY")
_NAME = re.compile(
    r"(?:^|[_\-])(?:token|secret|password|passwd|pwd|passphrase|credential|authorization)s?$"
    r"|[_\-]key$|apikey$"
)
"""A setting's name, in lower case; ``max_tokens`` holds a number, and ``tokenizer`` is none."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACEHOLDERS = re.compile(r"(?:\$\{[A-Za-z_][A-Za-z0-9_]*\}|:)+")
"""``${USER}:${PASSWORD}``: names of variables, no secret."""
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{16,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|nvapi-[\w-]{20,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*)|\b(?:[Bb]earer|[Bb]asic) (?=\S*[\d=])[\w+/.=~-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""As services make them: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, NVIDIA, JWT."""
_USERINFO = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
"""Up to the last @: HTTP libraries take a password with one in it."""
_IN_QUERY = re.compile(
    r"(?i)([?&](?:[\w.-]*(?:token|secret|password|signature|credential|_key)|api-?key|key|sig)=)"
    r"([^&\s'\"#]+)"
)


def looks_secret(name: str) -> bool:
    """Whether a variable of this name most likely holds a token, password or key."""
    name = name.upper().replace("TOKENIZER", "")  # TOKENIZERS_PARALLELISM
    return any(word in name for word in SECRET_WORDS)


def secrets_in(tree: object, path: str = "") -> Iterator[str]:
    """Every setting that looks like a secret, by its path and why; never its value."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from secrets_in(value, f"{path}.{name}".lstrip("."))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from secrets_in(value, f"{path}.{number}")
    elif isinstance(tree, str) and tree and (why := _why(path, tree)):
        yield f"{path} {why}"


def _why(path: str, value: str) -> str:
    name = re.sub(r"\.\d+$", "", path)
    leaf = name.rpartition(".")[2]
    if _TOKEN.search(value):
        return "holds what looks like a token or key"
    if any(_is_literal(found) for found in _userinfo_of(value)):
        return "is a URL with a user or password in it"
    if any(_is_literal(found.group(2)) for found in _IN_QUERY.finditer(value)):
        return "is a URL with a key in it"
    is_variable = name.endswith(f".env_vars.{leaf}") and looks_secret(leaf)
    if _is_literal(value) and (is_variable or _NAME.search(leaf.lower())):
        return "looks like a secret by its name"
    stem = leaf.lower().removesuffix("_env")
    if stem != leaf.lower() and _NAME.search(stem) and not _VARIABLE.fullmatch(value):
        return "must be the name of an environment variable, and is none"
    return ""


def _userinfo_of(value: str) -> Iterator[str]:
    for found in _USERINFO.finditer(value):
        # git+ssh://git@host is no secret: the key lies elsewhere.
        is_ssh = value[: found.start()].endswith("ssh://") and ":" not in found.group()
        if not is_ssh:
            yield found.group()


def _is_literal(value: str) -> bool:
    return not _PLACEHOLDERS.fullmatch(value)


REMEDY = (
    "config.yaml, the report and Ray's dashboard would show it. Put it into an environment "
    "variable of the nodes (Kubernetes secret, Slurm's job environment) and name that: "
    "options.api_key_env: NAME, or ${NAME} in options.url; for pip PIP_INDEX_URL, ~/.netrc or "
    "${NAME} in the URL. See docs/security.md"
)
"""What to do instead."""


def redacted(text: str) -> str:
    """``text`` without what looks like a token, and without what URLs hold of users and keys."""
    text = _TOKEN.sub("***", _IN_QUERY.sub(r"\1***", text))
    return _USERINFO.sub(lambda found: "***" if _is_literal(found[0]) else found[0], text)


def publishable(tree: Any, path: str = "") -> Any:
    """A copy of settings to be shown to others: of a URL its scheme, of a secret nothing."""
    if isinstance(tree, Mapping):
        return {name: publishable(value, f"{path}.{name}") for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [publishable(value, f"{path}.{number}") for number, value in enumerate(tree)]
    if not isinstance(tree, str):
        return tree
    return "***" if tree and _why(path, tree) else re.sub(r"(\w+://)[^\s'\"]+", r"\1***", tree)
