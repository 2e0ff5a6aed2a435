"""Whether two model folders hold the same files, without reading all of their 24 GB."""

import hashlib
from pathlib import Path

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import ModelSection

WHOLE_BELOW = 1 << 24
"""Files up to this size enter a fingerprint whole, larger ones by header and samples."""
SAMPLE_BYTES, SAMPLES = 4096, 256


def folder_fingerprint(folder: Path, pattern: str = "*") -> str:
    """16 hexadecimal digits of SHA-256, equal for equal files wherever they lie.

    Of a large weight file only its size, its header and 256 evenly spaced blocks of 4 KiB enter:
    another model or precision differs in all of them.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.glob(pattern) if path.is_file()):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(sampled(file))
    return digest.hexdigest()[:16]


def base_fingerprint(model: ModelSection) -> str:
    """Of the transformer's weights in ``model.path``, from which training begins."""
    return folder_fingerprint(resolve_path(model.path) / "transformer", "*.safetensors")


def sampled(file: Path) -> bytes:
    """A file's content; of one above 16 MiB its header and evenly spaced blocks."""
    size = file.stat().st_size
    with file.open("rb") as content:
        if size <= WHOLE_BELOW:
            return content.read()
        # safetensors: 8 bytes of header length, the header, then the tensors.
        length = int.from_bytes(content.read(8), "little")
        blocks = [content.read(min(length, WHOLE_BELOW))]
        for number in range(SAMPLES):
            content.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            blocks.append(content.read(SAMPLE_BYTES))
        return b"".join(blocks)
