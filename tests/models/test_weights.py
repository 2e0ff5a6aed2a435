"""Weights by name: they bind completely or not at all, and the checksum proves it."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.weights import (
    BLOCK,
    PINNED_BYTES,
    PackedWeights,
    WeightMismatchError,
    _factors,
    load_weights,
    receipt,
    trainable_parameters,
    word_sums,
)
from tests.tiny import equal_weights, tiny_config


@pytest.fixture
def policy() -> Policy:
    return load_policy(tiny_config(Path("unused"), "model.lora.rank=2"))


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainable_parameters(policy).items()}


def changed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in weights.items()}


def flip_bit(tensor: Tensor, bit: int) -> None:
    words = tensor.view(-1)[-1:].view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    words ^= -(1 << bit) if bit == 8 * tensor.itemsize - 1 else 1 << bit


def test_weights_arrive_and_have_the_same_checksum(policy: Policy) -> None:
    new = changed(weights_of(policy))
    load_weights(policy, new)
    assert equal_weights(weights_of(policy), new)
    assert receipt(3, trainable_parameters(policy)) == receipt(3, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    weights = {"a": torch.randn(7, 5).to(dtype), "b": torch.randn(3).to(dtype)}
    checksums = {receipt(0, weights).checksum}
    bits = 8 * dtype.itemsize
    for bit in range(bits):
        flipped = {name: tensor.clone() for name, tensor in weights.items()}
        flip_bit(flipped["a"], bit)
        checksums.add(receipt(0, flipped).checksum)
    assert len(checksums) == 1 + bits


def alone(tensor: Tensor, start: int = 0) -> int:
    """The sum in Python's integers, a word at a time, in blocks of 16."""
    place, block = (np.random.Philox(key=key).random_raw(16) | np.uint64(1) for key in (4, 8))
    words = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).tolist()
    total = 0
    for number, word in enumerate(words, start):
        product = word * int(place[number % 16]) % 2**32
        total += (product - 2**32 * (product >= 2**31)) * int(block[number // 16])
    return (total + 2**63) % 2**64 - 2**63


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("g2rpo_ray.models.weights.CHECKSUM_SLICE", {"cpu": 40})
    monkeypatch.setattr("g2rpo_ray.models.weights.BLOCK", 16)
    _factors.cache_clear()
    yield
    _factors.cache_clear()


@pytest.mark.usefixtures("small_blocks")
def test_sums_do_not_depend_on_what_shares_a_kernel() -> None:
    # Alike and not, longer and shorter than what is summed at a time, and one without an element.
    lengths = [3, 7, 3, 25, 3, 0, 7, 3, 10, 3, 10, 61]
    tensors = [torch.randn(length) for length in lengths]
    tensors += [torch.randn(length).bfloat16() for length in lengths]
    assert word_sums(tensors) == [alone(t) for t in tensors]
    starts = list(range(len(tensors)))
    assert word_sums(tensors, starts) == list(map(alone, tensors, starts))
    assert word_sums([]) == []


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_sums_of_parts_add_up_to_the_whole(shards: int) -> None:
    for whole in (torch.randn(61), torch.randn(61).bfloat16()):
        parts = whole.tensor_split(shards)
        starts = [0, *np.cumsum([len(part) for part in parts])[:-1].tolist()]
        assert (sum(word_sums(parts, starts)) - word_sums([whole])[0]) % 2**64 == 0


def test_words_that_changed_places_change_the_checksum() -> None:
    rows = torch.randn(1024, 1025)  # longer than a block
    flat = rows.flatten()
    pairs = flat.clone().view(torch.int32)
    pairs[5] += 1
    pairs[900_000] -= 1
    others = {
        "rows permuted": rows[torch.randperm(1024)],
        "flipped": rows.flip(0),
        "off by one": flat.roll(1).view_as(rows),
        "off by a block": flat.roll(BLOCK).view_as(rows),
        "buckets swapped": torch.cat([rows[512:], rows[:512]]),
        "+1 and -1": pairs.view(torch.float32).view_as(rows),
    }
    expected = receipt(0, {"a": rows})
    assert receipt(0, {"a": rows.clone()}) == expected
    assert [what for what, other in others.items() if receipt(0, {"a": other}) == expected] == []
    swapped = receipt(0, {"a": rows, "b": rows.flip(0)}), receipt(0, {"a": rows.flip(0), "b": rows})
    assert swapped[0] != swapped[1]


def test_the_checksum_is_the_same_on_every_machine() -> None:
    weights = {"a": torch.arange(2000.0).view(40, 50), "b": torch.ones(BLOCK + 3).bfloat16()}
    assert receipt(0, weights).checksum == "dd3478da1c4f1858"


def test_the_checksum_knows_names_shapes_and_dtypes() -> None:
    zeros = torch.zeros(2, 3)
    variants = [{"a": zeros}, {"b": zeros}, {"a": zeros.T}, {"a": zeros.bfloat16()},
                {"a": zeros, "b": zeros}]  # fmt: skip
    assert len({receipt(0, weights).checksum for weights in variants}) == len(variants)


def test_the_checksum_is_of_values_not_of_strides_or_order() -> None:
    tensor = torch.randn(4, 6)
    strided = torch.empty(6, 4).T.copy_(tensor)
    first = receipt(0, {"a": tensor, "b": tensor})
    assert first == receipt(0, {"b": strided, "a": strided})
    assert (first.tensors, first.bytes) == (2, 2 * 24 * 4)


def test_packed_weights_travel_in_one_buffer_and_bind(policy: Policy) -> None:
    new = changed(weights_of(policy))
    mixed = new | {"odd.bfloat16": torch.randn(3).bfloat16(), "scalar": torch.tensor(2.0)}
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(PackedWeights.of(mixed), protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    assert len(blob) < 20_000
    arrived = pickle.loads(blob, buffers=[buffer.raw().toreadonly() for buffer in buffers])
    assert equal_weights(arrived, mixed)
    assert receipt(3, arrived) == receipt(3, mixed)
    load_weights(policy, PackedWeights.of(new))
    assert equal_weights(weights_of(policy), new)


def test_missing_and_unknown_names_change_nothing(policy: Policy) -> None:
    before = weights_of(policy)
    new = changed(before)
    missing = sorted(new)[0]
    del new[missing]
    new["somewhere.else"] = torch.zeros(1)
    with pytest.raises(WeightMismatchError) as caught:
        load_weights(policy, new)
    message = str(caught.value)
    assert f"1 trainable tensors are missing ({missing})" in message
    assert "1 have no place (somewhere.else)" in message
    assert equal_weights(weights_of(policy), before)


def test_no_weights_at_all_are_refused(policy: Policy) -> None:
    with pytest.raises(WeightMismatchError, match="trainable tensors are missing"):
        load_weights(policy, {})


def test_another_shape_changes_nothing(policy: Policy) -> None:
    before = weights_of(policy)
    new = changed(before)
    # The last one: everything before it would be copied already.
    name = list(new)[-1]
    new[name] = new[name][:-1]
    with pytest.raises(WeightMismatchError) as caught:
        load_weights(policy, new)
    assert name in str(caught.value)
    assert str(tuple(new[name].shape)) in str(caught.value)
    assert str(tuple(before[name].shape)) in str(caught.value)
    assert equal_weights(weights_of(policy), before)


def test_adapters_do_not_bind_to_a_full_model(policy: Policy) -> None:
    full = load_policy(tiny_config(Path("unused")))
    with pytest.raises(WeightMismatchError, match=r"model\.lora"):
        load_weights(full, weights_of(policy))


@pytest.mark.gpu
def test_packed_weights_reach_a_card_in_pieces() -> None:
    size = 2 * PINNED_BYTES + 6
    packed = PackedWeights.of({"a": torch.randn(size // 2).bfloat16(), "b": torch.randn(3)})
    arrived = packed.to(torch.device("cuda"))
    assert {tensor.device.type for tensor in arrived.values()} == {"cuda"}
    assert receipt(0, arrived) == receipt(0, packed)
