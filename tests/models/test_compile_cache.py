"""Compiled code is kept between runs, in a folder that can be written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from g2rpo_ray.config.rollout import AUTO_BATCH_SIZES
from g2rpo_ray.models.kernels import (
    CACHE_VARIABLE,
    CompileCacheError,
    compile_blocks,
    keep_compiled,
)
from g2rpo_ray.models.policy import load_policy
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[2]
START = """
import json, resource, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from g2rpo_ray.models.kernels import compile_blocks
from g2rpo_ray.models.policy import load_policy
from tests.tiny import tiny_config
folder = Path(sys.argv[1])
config = tiny_config(folder, f"rollout.compile_cache={folder / 'code'}")
policy = load_policy(config)
compile_blocks(policy, config.rollout.compile_cache)
embeds = policy.blank(config.prompts.max_sequence_length, torch.float32, "cpu")
latents = torch.zeros(1, *policy.shape.packed)
policy(latents, torch.ones(1), embeds).square().mean().backward()
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
found = {key: counters["inductor"][f"fxgraph_cache_{key}"] for key in ("hit", "miss", "bypass")}
print(json.dumps(found | {"cpu_s": round(sum(u.ru_utime + u.ru_stime for u in used), 1)}))
"""


def start(folder: Path) -> dict[str, float]:
    """What a new process finds in the folder's cache for a pass forward and back, and the CPU
    seconds that it takes."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    print(first, second)
    assert first["miss"] > 0
    assert (second["miss"], second["bypass"]) == (0, 0)
    # Blocks whose code is the same are found within a start, too.
    assert second["hit"] == first["miss"] + first["hit"]


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also afterwards, where it was before: what is not set, a monkeypatch does not restore."""
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.delenv(CACHE_VARIABLE)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unset(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(CompileCacheError, match=r"rollout.compile_cache '.*file/code': cannot be"):
        keep_compiled(str(tmp_path / "file" / "code"))
    # Nobody asked for that one: PyTorch's own serves.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled(None)
    assert CACHE_VARIABLE not in os.environ


def test_where_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unset(monkeypatch)
    keep_compiled(None)
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "g2rpo_ray" / "compiled")
    # What the environment says stays, unless the settings name another.
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    keep_compiled(None)
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "own")
    keep_compiled(str(tmp_path / "named"))
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "named")


@pytest.mark.slow
def test_every_batch_size_that_auto_tries_compiles_for_two_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exact and as float8; here one of the two has adapters."""
    unset(monkeypatch)
    compile_plainly = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile_plainly(self, backend="eager", **options),
    )
    configs = [tiny_config(tmp_path, *more) for more in ([], ["model.lora.rank=2"])]
    with torch.no_grad():
        for policy in map(load_policy, configs):
            embeds = policy.blank(4, torch.float32, "cpu")
            compile_blocks(policy, str(tmp_path / "code"))
            for rows in AUTO_BATCH_SIZES:
                policy(torch.zeros(rows, *policy.shape.packed), torch.ones(rows), embeds)
