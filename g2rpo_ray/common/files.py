"""Files: written whole or not at all, read with a named error, and told apart by a checksum."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Raises:
        error: it is missing, cannot be read as JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise error(f"{path}: not readable as JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise error(f"{path}: expected a JSON object")
    return content


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
