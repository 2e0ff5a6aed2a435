"""Environments for scorers whose package cannot live beside Ray.

``python -m g2rpo_ray.rewards.scorers.isolated hpsv2 FOLDER`` makes that of the ``hpsv2`` scorer.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from g2rpo_ray.rewards.scorer import ScorerError

HPSV2_PACKAGES = ("hpsv2==1.2.0", "clint", "args", "braceexpand", "webdataset")
"""Without their own dependencies: hpsv2 pins an old protobuf and pytest that it does not use."""
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
TAIL_CHARACTERS, LIMIT_S = 600, 600


def make_hpsv2_environment(folder: Path) -> Path:
    """A virtual environment with hpsv2 and its missing vocabulary; this one's packages (torch,
    torchvision, transformers) stay visible behind its own.

    Returns:
        Path of its Python.

    Raises:
        ScorerError: venv or pip failed, with pip's output.
    """
    import open_clip

    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    _run([*install, *HPSV2_PACKAGES])
    vocabulary = Path(open_clip.__file__).parent / VOCABULARY
    shutil.copyfile(vocabulary, packages / "hpsv2" / "src" / "open_clip" / VOCABULARY)
    return python


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ScorerError(f"{' '.join(command)} did not end within {LIMIT_S} s") from error
    if result.returncode != 0:
        output = (result.stdout + result.stderr)[-TAIL_CHARACTERS:]
        raise ScorerError(f"{' '.join(command)} failed: {output}")


if __name__ == "__main__":
    if sys.argv[1:2] != ["hpsv2"] or len(sys.argv) != 3:
        raise SystemExit("usage: python -m g2rpo_ray.rewards.scorers.isolated hpsv2 FOLDER")
    print(make_hpsv2_environment(Path(sys.argv[2])))
