"""Starts roles with no GPU; each says where it computes: ``tests.common.device.roles F NAME...``.

Writes ``F/<role>.json``: what its process found, or the error that it ended with.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch
from torch import Tensor

from g2rpo_ray.cluster.connect import ray_cluster
from g2rpo_ray.cluster.demand import learner_demand
from g2rpo_ray.cluster.placement import placed
from g2rpo_ray.common.section import Section
from g2rpo_ray.config import Config
from g2rpo_ray.evaluation import sample as sample_module
from g2rpo_ray.learner.ranks import LearnerGroup
from g2rpo_ray.models.text import TextEncoder
from g2rpo_ray.prompts.encoder import ShardEncoder
from g2rpo_ray.prompts.selection import Selection
from g2rpo_ray.rewards.scorer import RewardScorer
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.rewards.server import reward_servers
from g2rpo_ray.rollout.actor import hire_actor
from g2rpo_ray.training import embed as embed_module
from g2rpo_ray.training import roles as training_roles
from tests.tiny import CAPTIONS, Redness, tiny_config

Found = dict[str, Any]


def found(*devices: torch.device | str, **more: str) -> Found:
    """What a process says of itself."""
    return {
        "devices": sorted({str(device) for device in devices}),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "sees_a_card": torch.cuda.is_available(),
        "initialized": torch.cuda.is_initialized(),
    } | more


def rollout_worker(config: Config) -> Found:
    def look(worker: Any) -> Found:
        return found(worker.device, *(p.device for p in worker.policy.parameters()))

    handle = hire_actor(config, ())
    ray.get(handle.start.remote(config, Redness(["red"]), 0))
    return ray.get(handle.__ray_call__.remote(look))


def learner_rank(config: Config) -> Found:
    def look(rank: Any) -> Found:
        from deepspeed.accelerator import get_accelerator

        return found(
            rank.device,
            *(tensor.device for tensor in rank.engine.weights().values()),
            accelerator=get_accelerator().device_name(),
            backend=torch.distributed.get_backend(),
        )

    with placed([learner_demand(config)], [], 360.0, print) as placement:
        assert placement is not None
        group = LearnerGroup(config, placement, None)
        group.start()
        answers = ray.get([rank.__ray_call__.remote(look) for rank in group.ranks])
        group.close()
    assert answers[0] == answers[1]
    return answers[0]


def encoder_devices(encoder: TextEncoder) -> list[torch.device]:
    parts = encoder._pipeline.components.values()
    networks = [part for part in parts if isinstance(part, torch.nn.Module)]
    return [next(network.parameters()).device for network in networks]


def prompt_encoder(config: Config) -> Found:
    def look(encoder: Any) -> Found:
        return found(*encoder_devices(encoder._encoder._encoder))

    with training_roles._encoder(config, None, []) as encoder:
        ray.get(encoder.training([(0, "no prompt of the tiny world: it must be encoded")]))
        return ray.get(encoder.actor.__ray_call__.remote(look))


class WitnessScorer(RewardScorer):
    """Writes down where it was told to compute."""

    class Options(Section):
        """Where to write."""

        file: str

    kind = "witness"

    def __init__(self, options: Section, device: str) -> None:
        assert isinstance(options, self.Options)
        Path(options.file).write_text(json.dumps(found(device)))

    def score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:  # noqa: ARG002
        return torch.zeros(len(pictures))


def reward_replica(config: Config) -> Found:
    file = Path(config.run_dir) / "witness.json"
    options = {"target": "tests.common.device.roles:WitnessScorer", "options": {"file": str(file)}}
    reward = RewardSection(kind="python", options=options, cpus_per_replica=0.1)
    with reward_servers("witness", {"witness": reward}, 360.0, private_cluster=False):
        return json.loads(file.read_text())


class WitnessEncoder(ShardEncoder):
    """Writes down where it encodes, beside the shards."""

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        seen = found(*encoder_devices(self._encoder))
        (self._folder.parent / "witness_encoder.json").write_text(json.dumps(seen))
        return super().__call__(row)


def embed_worker(config: Config) -> Found:
    folder = Path(config.run_dir)
    prompts = folder / "prompts.txt"
    prompts.write_text(CAPTIONS[0])
    options = embed_module.EmbedOptions(cpus_per_worker=0.5)
    with (
        mock.patch.object(embed_module, "ShardEncoder", WitnessEncoder),
        mock.patch.object(embed_module, "ray_cluster", nullcontext),
    ):
        embed_module.embed(config, str(prompts), folder / "embedded", Selection(), options)
    return json.loads((folder / "witness_encoder.json").read_text())


def sample(config: Config) -> Found:
    seen: list[torch.device] = []

    class Seen(sample_module.PictureDecoder):
        def decode(self, latents: Tensor) -> Tensor:
            seen.extend([latents.device, next(self.vae.parameters()).device])
            return super().decode(latents)

    with mock.patch.object(sample_module, "PictureDecoder", Seen):
        options = sample_module.SampleOptions(CAPTIONS[:1], checkpoint="base")
        list(sample_module.sample(config, options, Path(config.run_dir) / "pictures"))
    return found(*seen)


ROLES: dict[str, Callable[[Config], Found]] = {
    "rollout_worker": rollout_worker,
    "learner_rank": learner_rank,
    "prompt_encoder": prompt_encoder,
    "reward_replica": reward_replica,
    "embed_worker": embed_worker,
}
"""Each in processes of its own, which Ray starts."""
COMMANDS: dict[str, Callable[[Config], Found]] = {"sample": sample}
"""Those that compute in the process of the command line."""


def main(folder: Path, names: Sequence[str]) -> None:
    config = tiny_config(folder)
    with ray_cluster(config.cluster):
        for name in names:
            try:
                seen = (ROLES | COMMANDS)[name](config)
            except Exception as error:  # noqa: BLE001  (each role is judged by itself)
                seen = {"error": f"{type(error).__name__}: {error}"}
            (folder / f"{name}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
