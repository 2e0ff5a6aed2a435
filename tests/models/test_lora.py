"""LoRA: which modules are covered, and that a fresh adapter changes nothing."""

from pathlib import Path

import pytest
import torch
from torch import nn

from g2rpo_ray.maths import noise
from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.loading import ModelFolderError
from g2rpo_ray.models.lora import coverage
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.models.weights import trainable_parameters
from tests.tiny import equal_weights, tiny_config


def policy_of(*overrides: str) -> Policy:
    return load_policy(tiny_config(Path("unused"), *overrides))


def adapted_modules(policy: Policy) -> set[str]:
    return {name.partition(".lora_")[0] for name in trainable_parameters(policy)}


def velocity(policy: Policy) -> torch.Tensor:
    embeds = Conditioning(
        {"t5": noise.normal((10, 64), "t5"), "pooled": noise.normal((64,), "pooled")}
    )
    with torch.no_grad():
        result: torch.Tensor = policy(
            noise.normal((2, *policy.shape.packed), "x"), torch.tensor([0.9, 0.3]), embeds
        )
    return result


def test_every_projection_of_every_block_is_covered() -> None:
    full = policy_of().transformer
    blocks = {
        name
        for name, module in full.named_modules()
        if isinstance(module, nn.Linear) and "transformer_blocks." in name and ".norm" not in name
    }
    # Two double blocks of 12 and two single blocks of 5.
    assert len(blocks) == 2 * 12 + 2 * 5
    assert adapted_modules(policy_of("model.lora.rank=4")) == blocks


def test_only_adapters_are_trained() -> None:
    policy = policy_of("model.lora.rank=4")
    names = trainable_parameters(policy)
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert len(names) == 2 * 34
    assert "68 tensors of 34 modules" in coverage(policy.transformer)


def test_a_choice_of_modules_is_trained_alone() -> None:
    policy = policy_of("model.trained_modules=[single_transformer_blocks, attn.to_q]")
    names = set(trainable_parameters(policy))
    every = {name for name, _ in policy.transformer.named_parameters()}
    assert names == {n for n in every if n.startswith("single_") or ".attn.to_q." in n}
    assert 0 < len(names) < len(every)


def test_a_chosen_module_that_is_none_is_named() -> None:
    with pytest.raises(ModelFolderError, match=r"model\.trained_modules: 'blocks' is part of no"):
        policy_of("model.trained_modules=[blocks]")


def test_full_fine_tuning_trains_everything() -> None:
    policy = policy_of()
    count = sum(p.numel() for p in policy.parameters())
    assert len(trainable_parameters(policy)) == len(list(policy.transformer.parameters()))
    assert coverage(policy.transformer).startswith(f"{count:,} of {count:,} parameters")


def test_explicit_targets() -> None:
    policy = policy_of(
        "model.lora.rank=2",
        "model.lora.target_modules=[attn.to_q, single_transformer_blocks.*.proj_out]",
    )
    assert adapted_modules(policy) == {
        *(f"transformer_blocks.{block}.attn.to_q" for block in (0, 1)),
        *(f"single_transformer_blocks.{block}.attn.to_q" for block in (0, 1)),
        *(f"single_transformer_blocks.{block}.proj_out" for block in (0, 1)),
    }


@pytest.mark.parametrize("target", ["attn.to_qq", "to_out", "transformer_blocks.*.norm"])
def test_a_target_that_matches_nothing_is_an_error(target: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        policy_of("model.lora.rank=2", f"model.lora.target_modules=[attn.to_q, '{target}']")
    message = str(caught.value)
    assert f"model.lora.target_modules: '{target}' matches no linear layer" in message
    assert "examples of layers: " in message


def test_a_fresh_adapter_leaves_the_output_unchanged() -> None:
    assert torch.equal(velocity(policy_of("model.lora.rank=4")), velocity(policy_of()))


def test_an_adapter_with_weights_changes_the_output() -> None:
    policy = policy_of("model.lora.rank=4")
    with torch.no_grad():
        for name, parameter in trainable_parameters(policy).items():
            if ".lora_B." in name:
                parameter.fill_(0.01)
    assert not torch.allclose(velocity(policy), velocity(policy_of()), atol=1e-3)


@pytest.mark.parametrize("overrides", [[], ["model.lora.rank=4"]])
def test_both_sides_build_the_same_names_and_bits(overrides: list[str]) -> None:
    torch.manual_seed(1)
    rollout = dict(trainable_parameters(policy_of(*overrides)))
    torch.manual_seed(2)
    learner = dict(trainable_parameters(policy_of(*overrides)))
    assert equal_weights(rollout, learner)


def test_the_runs_seed_makes_the_adapters() -> None:
    first, second = (
        dict(trainable_parameters(policy_of("model.lora.rank=4", f"seed={seed}")))
        for seed in (0, 1)
    )
    assert not equal_weights(first, second)
