"""Which device a role or a command computes on: its setting decides, not what the process sees."""

import os

import torch

from g2rpo_ray.common.errors import InputError

HIDE_CARDS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""Environment in which Ray hides all cards from a process that it reserves none for."""
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
}
"""Environment in which glibc keeps up to 128 MiB of what a process frees for its next tensors. By
itself it gives the kernel more back, which clears each page again: 40 % of decoding on a CPU."""


class DeviceError(InputError):
    """A card is asked for where none can be used; the message names the setting."""


def role_device(gpus: float, setting: str) -> torch.device:
    """The CPU if ``gpus`` is 0, whatever cards the process sees; else its card.

    Args:
        gpus: that are reserved for the role; below 1 it is a share of one card.
        setting: that says so, as the user writes it.

    Raises:
        DeviceError: a card is asked for, and the process sees none.
    """
    if gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"{setting} is {gpus:g} and this process can use no card (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}, torch {torch.__version__}); "
            f"allowed without one: 0, which computes on the CPU. Set {setting} to 0, or see with "
            "nvidia-smi and 'g2rpo doctor' why torch finds no card"
        )
    return torch.device("cuda")


def keep_to_share(gpus: float) -> None:
    """Let a role with a share of a card take only that share of its memory.

    It fails with an out-of-memory error of its own instead of taking the others' place.
    """
    if 0 < gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus)


def give_back(gpus: float) -> None:
    """At the end of a task: a role with a share of a card leaves to the others there what it does
    not hold any more, and PyTorch would keep for it. A matter of milliseconds."""
    if 0 < gpus < 1:
        torch.cuda.empty_cache()


def compute_the_same_bits() -> None:
    """From now on this process computes as every other run does on such a card, but for what only
    backward passes do (``add_in_one_order``).

    It is to be called before the first matrix product, which fixes cuBLAS's workspace.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # No convolution adds in any order, and no kernel is chosen by its time: the compiler's own
    # setting for that follows this one, at the end of every compilation.
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def add_in_one_order() -> None:
    """After ``compute_the_same_bits``, for who trains: backward passes, too. An operation that
    cannot is an error."""
    torch.use_deterministic_algorithms(True)


def describe_device(gpus: float, setting: str) -> str:
    """For people: where it is computed, and which setting says so."""
    return f"{'GPU' if gpus else 'CPU'} ({setting} is {gpus:g})"
