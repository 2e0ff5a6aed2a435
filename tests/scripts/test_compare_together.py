"""Prompts that a comparison draws together."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from comparing.runs import local_worker
from comparing.together import Meeting, Together
from g2rpo_ray.config import load_config
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.dataset import Prompt, read_config_prompts
from tests.integration.command import ROOT

SMALL = ["sampling.members=2", "sampling.steps=5", "rollout.batch_size=16"]


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm=g2rpo", "g2rpo.sde_steps=[0,2]", "g2rpo.granularities=[1,2]"],
        ["algorithm=mix_grpo", "mix_grpo.window=2"],
        ["algorithm=diffusion_nft", "learner.old_log_prob=rollout"],
    ],
    ids=lambda settings: str(settings[0]),
)
def test_each_prompt_has_the_group_that_it_has_alone(settings: list[str]) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *settings])
    worker = local_worker(config)
    encoder = TextEncoder(config.model, config.prompts.max_sequence_length)
    texts = read_config_prompts(config, config.prompts.train)[:3]
    prompts = [Prompt(n, text, encoder.encode(text)) for n, text in enumerate(texts)]
    alone = [worker.rollout(prompt, 6 + n, 2)[1] for n, prompt in enumerate(prompts)]
    together = Together(worker).rollouts(prompts, 6, 2)
    for one, other in zip(alone, together, strict=True):
        assert one.key == other.key
        assert one.evaluations == other.evaluations
        assert one.prompt.text == other.prompt.text
        assert torch.allclose(one.latents, other.latents, atol=1e-4)
        assert torch.allclose(one.velocities, other.velocities, atol=1e-4)
        assert torch.allclose(one.rewards, other.rewards, atol=5e-3)
    first = [group.rewards.flatten()[0] for group in together]
    assert len({float(reward) for reward in first}) == 3


def test_what_all_ask_is_done_once_in_their_order() -> None:
    asked = []

    def work(items: list[str]) -> list[str]:
        asked.append(items)
        return [item * 2 for item in items]

    meeting = Meeting(3)

    def lane(number: int) -> list[str]:
        found = [meeting.ask(number, work, f"{number}{turn}") for turn in range(1 + number)]
        meeting.leave(number)
        return found

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lane, range(3)))
    assert asked == [["00", "10", "20"], ["11", "21"], ["22"]]
    assert found == [["0000"], ["1010", "1111"], ["2020", "2121", "2222"]]


def test_a_failure_reaches_every_lane() -> None:
    def fails(_: list[str]) -> list[str]:
        raise ValueError("no such picture")

    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as threads:
        lanes = [threads.submit(partial(meeting.ask, n, fails, "")) for n in range(2)]
        for lane in lanes:
            with pytest.raises(RuntimeError, match="drawn together failed") as caught:
                lane.result(timeout=60)
            assert isinstance(caught.value.__cause__, ValueError)


def test_lanes_that_ask_for_different_things_are_told() -> None:
    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as threads:
        lanes = [threads.submit(meeting.ask, n, work, n) for n, work in enumerate((list, tuple))]
        for lane in lanes:
            with pytest.raises(RuntimeError) as caught:
                lane.result(timeout=60)
            assert "out of step" in str(caught.value.__cause__)
