"""Whether two model folders hold the same weights, without reading all of their 24 GB."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from g2rpo_ray.common.files import read_json_object
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.common.weight_files import TensorPlace
from g2rpo_ray.config import ModelSection
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.loading import is_network, part_weights

WHOLE_BELOW = 1 << 24
"""Files up to this size enter a fingerprint whole, larger ones by header and samples."""
SAMPLE_BYTES, SAMPLES = 4096, 256
TENSOR_SAMPLES = 4
"""Blocks of every tensor: a transformer has hundreds of them."""
OF_TENSORS = "tensors:"
"""Begins a fingerprint of tensors; those of files, as they were made before, begin with nothing."""
OF_WRITER = ("_diffusers_version", "_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""What a config.json tells of who wrote it and in which precision, not of the network."""


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
    """Of the transformer's weights in ``model.path``, from which training begins: equal for a copy
    and for the same tensors in other shards.

    Raises:
        ModelFolderError: as of ``part_weights``.
    """
    if model.random_weights:
        return f"{OF_TENSORS}random"
    return OF_TENSORS + tensors_fingerprint(part_weights(model, "transformer"))


def base_file_fingerprint(model: ModelSection) -> str:
    """Of the transformer's files, as checkpoints were written with before."""
    return folder_fingerprint(resolve_path(model.path) / "transformer", "*.safetensors")


def encoder_part_fingerprint(model: ModelSection, part: str) -> str:
    """Of a text encoder's tensors and configuration, or of a tokenizer's files."""
    folder = resolve_path(model.path) / part
    if not is_network(part):
        return folder_fingerprint(folder)
    config = read_json_object(folder / "config.json", ModelFolderError)
    kept = {key: value for key, value in config.items() if key not in OF_WRITER}
    text = json.dumps(kept, sort_keys=True) + tensors_fingerprint(part_weights(model, part))
    return OF_TENSORS + hashlib.sha256(text.encode()).hexdigest()[:16]


def tensors_fingerprint(places: Mapping[str, TensorPlace]) -> str:
    """16 hexadecimal digits of SHA-256 over every tensor's name, type, shape and samples.

    Of a tensor above 16 KiB four evenly spaced blocks of 4 KiB enter: another model or precision
    differs in all of them.
    """
    digest = hashlib.sha256()
    offsets = {file: _offsets(file) for file in {place.file for place in places.values()}}
    opened = {file: file.open("rb") for file in offsets}
    try:
        for name in sorted(places):
            place = places[name]
            digest.update(f"{name} {place.dtype} {place.shape}\n".encode())
            begin, end = offsets[place.file][name]
            for start in _block_starts(end - begin):
                opened[place.file].seek(begin + start)
                digest.update(opened[place.file].read(min(SAMPLE_BYTES, end - begin - start)))
    finally:
        for content in opened.values():
            content.close()
    return digest.hexdigest()[:16]


def _block_starts(size: int) -> list[int]:
    if size <= TENSOR_SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    last = size - SAMPLE_BYTES
    return [number * last // (TENSOR_SAMPLES - 1) for number in range(TENSOR_SAMPLES)]


def _offsets(file: Path) -> dict[str, tuple[int, int]]:
    """First byte of every tensor in a whole safetensors file, and the one after its last."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    header.pop("__metadata__", None)
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
    }


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
