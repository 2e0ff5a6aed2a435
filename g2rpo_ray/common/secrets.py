"""Names of variables that look like a secret; without other imports, for ``cluster/submit.py``."""

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "_KEY")


def looks_secret(name: str) -> bool:
    """Whether a variable of this name most likely holds a token, password or key."""
    return any(word in name.upper() for word in SECRET_WORDS)
