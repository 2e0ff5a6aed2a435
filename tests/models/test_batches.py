"""What is said where a device's memory ends."""

import subprocess
import sys

import pytest
import torch

from g2rpo_ray.common.device import give_back
from g2rpo_ray.models.batches import DeviceMemoryError, name_memory


def test_who_holds_the_rest_of_the_card_is_named_as_ray_names_it() -> None:
    code = "import sys, time; print(flush=True); time.sleep(60)"
    role = subprocess.Popen(
        ["ray::Learner.update", "-c", code], executable=sys.executable, stdout=subprocess.PIPE
    )
    try:
        assert role.stdout is not None
        role.stdout.readline()
        raised = torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate 2.00 GiB. Process {role.pid} has 20.00 GiB "
            "memory in use. Process 99999999 has 1.00 GiB memory in use. If reserved but unused"
        )
        with pytest.raises(DeviceMemoryError) as caught, name_memory("an update", "change this"):
            raise raised
    finally:
        role.kill()
        role.wait()
    said = str(caught.value)
    assert said.startswith("an update: no room beside what is on the device (CUDA out of memory.")
    assert f"ray::Learner.update -c {code} (process {role.pid}) has 20.00 GiB" in said
    assert "Process 99999999 has 1.00 GiB memory in use.); change this" in said


@pytest.mark.parametrize(("gpus", "calls"), [(0.0, 0), (0.4, 1), (1.0, 0), (2.0, 0)])
def test_who_shares_a_card_gives_back_what_it_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, gpus: float, calls: int
) -> None:
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    give_back(gpus)
    assert len(emptied) == calls
