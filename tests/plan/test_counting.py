"""Counts of operations that repeat, against counts by hand."""

import torch
from torch import nn

from g2rpo_ray.plan.counting import Operations, count_bytes, count_operations


def alike_blocks(count: int) -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(count))
    return nn.Sequential(*blocks).to("meta")


def test_blocks_that_are_alike_count_each() -> None:
    network, x = alike_blocks(5), torch.empty(4, 8, device="meta")
    # Three of 4 x 8 floats are held at once: what a block is given, makes within, and gives.
    expected = Operations(matrix=5 * 2 * 4 * 8 * 8, attention=0, peak_bytes=3 * 128)
    assert count_operations(lambda: network(x)) == expected
    # For the gradients all are kept.
    assert count_bytes(lambda: network(x)) == 5 * 2 * 128


def test_an_operation_in_place_makes_nothing() -> None:
    x = torch.empty(4, 8, device="meta")

    def run() -> None:
        first, second = x + 1, x + 1
        for _ in range(3):
            first.add_(second)

    assert count_bytes(run) == 2 * 128


def test_equal_numbers_of_other_types_make_other_sizes() -> None:
    x = torch.empty(4, dtype=torch.int8, device="meta")
    # An int8, a float32, an int8.
    assert count_bytes(lambda: [x * 2, x * 2.0, x * 2]) == 4 + 16 + 4


def test_a_part_of_a_storage_makes_nothing() -> None:
    x = torch.empty(4, 8, device="meta")
    assert count_bytes(lambda: [torch.unsafe_chunk(x + 1, 2)[0] for _ in range(3)]) == 3 * 128


def test_what_a_network_computes_on_the_cpu_keeps_its_value() -> None:
    found: list[int] = []
    count_operations(lambda: found.extend(int(torch.tensor(3) + 1) for _ in range(2)))
    assert found == [4, 4]
