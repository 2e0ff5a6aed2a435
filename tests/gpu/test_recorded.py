"""A recorded pass on a card: the same bits as the pass itself, with inputs and weights of now."""

import pytest
import torch

from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.models.weights import trainable_parameters
from g2rpo_ray.sampling.recorded import RecordedPass
from tests.models.families.folders import TINY, family_config
from tests.tiny import encode

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_every_family_plays_what_it_computes(name: str) -> None:
    config = family_config(name, "model.dtype=bfloat16", "model.lora.rank=2")
    prompts = [prompt.embeds.to(CARD) for prompt in encode(config)[:2]]
    policy, warnings = load_policy(config, CARD), list[str]()
    ours = RecordedPass(policy, warnings.append)
    for call in range(6):
        x = torch.randn(1, *policy.shape.packed, device=CARD)
        sigma, embeds = torch.rand(1, device=CARD), prompts[call // 3]
        if call == 2:
            # In place, as weights come: a graph reads them where they are.
            for weight in trainable_parameters(policy).values():
                weight.add_(0.1)
        assert torch.equal(ours(x, sigma, embeds), policy(x, sigma, embeds)), call
    # The others are tried too: one that works can be made recordable.
    print(f"{name}: {warnings or 'recorded'}")
    assert warnings == [] or not policy.family.recordable


@torch.no_grad()
def test_batches_of_many_shapes_share_memory_and_play_what_they_compute() -> None:
    config = family_config("flux1_dev")
    (prompt,) = encode(config)[:1]
    embeds = prompt.embeds.to(CARD)
    policy, warnings = load_policy(config, CARD), list[str]()
    ours = RecordedPass(policy, warnings.append, shapes=3)
    for rows in (1, 12, 96, 96, 12, 1, 12, 96, 1, 96, 12, 7, 7, 1, 7):
        x = torch.randn(rows, *policy.shape.packed, device=CARD)
        sigma = torch.rand(rows, device=CARD)
        assert torch.equal(ours(x, sigma, embeds), policy(x, sigma, embeds)), rows
    assert warnings == []
