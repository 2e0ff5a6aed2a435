"""Triton's kernels on a CPU."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.integration.command import ROOT, python_path


def interpreted(code: str, timeout_s: float = 480) -> Any:
    """What ``code`` prints last. Triton decides when it is imported whether it interprets."""
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": python_path()},
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])
