"""What ``model.deterministic`` promises, part by part: two processes on a card compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from g2rpo_ray.models.kernels import CACHE_VARIABLE
from tests.integration.command import ROOT, python_path

pytestmark = pytest.mark.gpu

PARTS = """
import hashlib, json, sys
from pathlib import Path
import torch
import measuring
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import load_config
from g2rpo_ray.plan.networks import planned_family
from g2rpo_ray.rewards.registry import make_scorer
from g2rpo_ray.sampling.engine import RolloutEngine
import true_size

recipe, device = Path(sys.argv[1]), torch.device("cuda")
config = load_config(recipe, ["model.random_weights=true", "model.deterministic=true"])
config = config.model_copy(update={"rewards": {"hps": config.rewards["hps"]}})
folder = resolve_path(config.model.path)
if not folder.exists():
    family, _ = planned_family(config.model.path)
    true_size.write_model(folder, family, networks=False, text_encoders=False)
    transformer = folder / "transformer" / "config.json"
    measuring.change_json(transformer, {"num_layers": 2, "num_single_layers": 2})
    true_size.write_scorers(config)
torch.manual_seed(0)
engine = RolloutEngine(config, device)
policy = engine.policy
with torch.no_grad():
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.01, generator=torch.Generator(device).manual_seed(1))
engine.weights_changed()
tokens = config.prompts.max_sequence_length
embeds = measuring.random_conditioning(policy.family, policy.transformer, tokens, torch.bfloat16)
embeds = embeds.to(device)
x = torch.randn(8, *policy.shape.packed, generator=torch.Generator().manual_seed(2)).to(device)
sigma = torch.linspace(0.1, 0.9, 8, device=device)
reward = config.rewards["hps"]
scorer = make_scorer(reward.kind, reward.options, device.type)
pictures = engine.decoder.decode(x)

def computed():
    yield "eight latents", engine.exact(x, sigma, embeds)
    yield "one latent", engine.exact(x[:1], sigma[:1], embeds)
    yield "pictures", engine.decoder.decode(x)
    for many in (1, 8):
        scores = scorer.score(pictures[:many], ["a red circle"] * many)
        yield f"scores of {many}", scores

found = {}
for _ in range(4):
    for name, tensor in computed():
        bits = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        found.setdefault(name, []).append(hashlib.sha256(bits).hexdigest()[:16])
print(json.dumps(found | {"warnings": engine.warnings}))
"""


def test_two_processes_compute_the_same_bits_of_every_part(tmp_path: Path) -> None:
    recipe = ROOT / "configs" / "flux_g2rpo_hps_one_gpu_lora.yaml"
    found = []
    for number in range(2):
        # Each compiles for itself: kept code would be the same whatever was chosen.
        answer = subprocess.run(
            [sys.executable, "-c", PARTS, str(recipe)], cwd=tmp_path,
            env=os.environ | {
                "PYTHONPATH": python_path(ROOT / "scripts"),
                CACHE_VARIABLE: str(tmp_path / f"compiled_{number}"),
            },
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr[-3000:]
        found.append(json.loads(answer.stdout.splitlines()[-1]))
    print(json.dumps(found, indent=1))
    first, second = found
    assert first.pop("warnings") == second.pop("warnings") == []
    for name, bits in first.items():
        assert len(set(bits)) == 1, f"{name} differ inside a process"
        assert bits == second[name], f"{name} differ from process to process"
