"""What a role frees stays its own, so that the kernel does not clear it again for each tensor."""

import os
import resource
import subprocess
import sys

import pytest

from g2rpo_ray.cluster.connect import worker_environment
from g2rpo_ray.common.device import KEEP_MEMORY
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.rewards.server import replica_environment

PASSES, TENSORS = 20, 8
DRAW = f"""
import resource, torch
def draw():
    # As activations of 4 MiB, all of them freed at the end of a pass.
    kept = [torch.ones(2**20) for _ in range({TENSORS})]
draw()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({PASSES}):
    draw()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def cleared_pages(environment: dict[str, str]) -> int:
    others = {name: value for name, value in os.environ.items() if name not in KEEP_MEMORY}
    done = subprocess.run(
        [sys.executable, "-c", DRAW],
        env=others | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_the_kernel_clears_few_pages_again() -> None:
    # Without the settings nearly those of all passes (162,206); with them 2,564 to 11,264.
    all_pages = PASSES * TENSORS * 2**22 // resource.getpagesize()
    assert cleared_pages(KEEP_MEMORY) < all_pages / 4


def test_every_role_has_the_settings_and_a_user_may_give_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert worker_environment(()).items() >= KEEP_MEMORY.items()
    assert (
        replica_environment(RewardSection(kind="oracle"))["env_vars"].items() >= KEEP_MEMORY.items()
    )
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert worker_environment(["MALLOC_*"])["MALLOC_TRIM_THRESHOLD_"] == "1"
    own = RewardSection(kind="oracle", runtime_env={"env_vars": {"MALLOC_TRIM_THRESHOLD_": "1"}})
    assert replica_environment(own)["env_vars"]["MALLOC_TRIM_THRESHOLD_"] == "1"
