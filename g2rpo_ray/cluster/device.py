"""The device of a role's process."""

import torch


def role_device(gpus: float) -> torch.device:
    """The role's card if the process sees one, else the CPU.

    A role that shares its card keeps to its share of the memory: it fails with an out-of-memory
    error of its own instead of taking the others' place.

    Args:
        gpus: that Ray reserved for the role; below 1 it is a share of one card.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if 0 < gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus)
    return torch.device("cuda")
