"""A pass over one latent that is recorded: when it is, and what it answers."""

from dataclasses import replace

import torch
from torch import Tensor

from g2rpo_ray.models.conditioning import Conditioning
from g2rpo_ray.models.policy import Policy, load_policy
from g2rpo_ray.sampling.recorded import RecordedPass, Recording
from tests.models.families.folders import family_config
from tests.tiny import encode


class Replayed(RecordedPass):
    """A CPU has no graphs: what is played reads the kept inputs and writes the kept output."""

    def __init__(self, policy: Policy, error: Exception | None = None, shapes: int = 1) -> None:
        self.warnings: list[str] = []
        self.recorded = self.played = 0
        self.error = error
        super().__init__(policy, self.warnings.append, shapes)

    def _record(self, x: Tensor, sigma: Tensor, embeds: Conditioning) -> Recording:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        output = torch.full_like(x, torch.nan)

        def play() -> None:
            self.played += 1
            output.copy_(self._policy(x, sigma, embeds))

        return Recording([x, sigma, *embeds.all_tensors], output, play)


def inputs(policy: Policy, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, *policy.shape.packed, generator=generator), torch.tensor([0.1 + seed / 9])


def shifted(embeds: Conditioning, by: float) -> Conditioning:
    negative = None if embeds.negative is None else shifted(embeds.negative, -by)
    return replace(
        embeds, tensors={n: t + by for n, t in embeds.tensors.items()}, negative=negative
    )


@torch.no_grad()
def test_what_is_played_reads_all_inputs_of_now() -> None:
    config = family_config("sd3")
    (prompt,) = encode(config)[:1]
    policy = load_policy(config)
    ours = Replayed(policy)
    kept = []
    for call in range(4):
        x, sigma = inputs(policy, call)
        embeds = shifted(prompt.embeds, 0.1 * call)
        expected = policy(x, sigma, embeds)
        kept.append((ours(x, sigma, embeds), expected))
    assert (ours.recorded, ours.played) == (1, 3)
    # Answers stay what they were when later ones come.
    assert all(torch.equal(answer, expected) for answer, expected in kept)
    assert not torch.equal(kept[0][0], kept[1][0])


@torch.no_grad()
def test_another_length_and_other_weights_are_recorded_anew() -> None:
    config = family_config("qwen_image")
    short, longer = encode(config, ["red", "a red circle"])
    policy = load_policy(config)
    ours = Replayed(policy)
    x, sigma = inputs(policy, 0)
    for prompt in (short, short, longer, longer, longer):
        assert torch.equal(ours(x, sigma, prompt.embeds), policy(x, sigma, prompt.embeds))
    assert (ours.recorded, ours.played) == (2, 3)
    weight = next(policy.parameters())
    weight.add_(0.1)
    ours.weights_changed()
    assert torch.equal(ours(x, sigma, longer.embeds), policy(x, sigma, longer.embeds))
    # Where they were before: the recording goes on.
    assert (ours.recorded, ours.played) == (2, 4)
    weight.data = weight.clone()
    ours.weights_changed()
    for _ in range(2):
        ours(x, sigma, longer.embeds)
    assert (ours.recorded, ours.played) == (3, 5)


@torch.no_grad()
def test_a_network_that_cannot_be_recorded_is_told_once() -> None:
    config = family_config("sd3")
    (prompt,) = encode(config)[:1]
    policy = load_policy(config)
    ours = Replayed(policy, RuntimeError("operation not permitted when stream is capturing"))
    x, sigma = inputs(policy, 0)
    for _ in range(4):
        assert torch.equal(ours(x, sigma, prompt.embeds), policy(x, sigma, prompt.embeds))
    (warning,) = ours.warnings
    assert "not permitted when stream is capturing" in warning


@torch.no_grad()
def test_the_shapes_that_were_used_last_are_kept() -> None:
    config = family_config("flux1_dev")
    (prompt,) = encode(config)[:1]
    policy = load_policy(config)
    ours = Replayed(policy, shapes=2)

    def ask(*batches: int) -> tuple[int, int]:
        for number, rows in enumerate(batches):
            x, sigma = (tensor.repeat_interleave(rows, dim=0) for tensor in inputs(policy, number))
            answer = ours(x, sigma, prompt.embeds)
            assert torch.equal(answer, policy(x, sigma, prompt.embeds))
        return ours.recorded, ours.played

    assert ask(1, 3, 1, 3, 1, 3) == (2, 4)
    # 3 has to go, since 1 was used after it.
    assert ask(1, 2, 1, 2) == (3, 7)
    assert ask(3) == (3, 7)
