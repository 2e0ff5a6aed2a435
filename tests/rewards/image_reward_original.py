"""Runs in an environment of ImageReward 1.5 and the transformers of its time: the package's own
model, made small, its scores of the pictures in a folder. Argument: the folder."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch


def load_package() -> Any:
    """ImageReward.ImageReward, without what its packages import for training and other scores."""
    import importlib.util

    found: Any = importlib.util.find_spec("ImageReward")
    (root,) = found.submodule_search_locations
    for name, folder in {"ImageReward": ".", "ImageReward.models": "models"}.items():
        package = types.ModuleType(name)
        package.__path__ = [str(Path(root) / folder)]
        sys.modules[name] = package
    fairscale: Any = types.ModuleType("fairscale.nn.checkpoint.checkpoint_activations")
    fairscale.checkpoint_wrapper = None  # for training only
    for name in ("fairscale", "fairscale.nn", "fairscale.nn.checkpoint", fairscale.__name__):
        sys.modules[name] = fairscale
    import ImageReward.ImageReward

    return ImageReward.ImageReward


def main(folder: Path) -> None:
    package = load_package()
    from ImageReward.models.BLIP import blip_pretrain
    from ImageReward.models.BLIP.vit import VisionTransformer
    from PIL import Image
    from transformers import BertTokenizer

    def small_vit(_: str, image_size: int, *__: object) -> tuple[VisionTransformer, int]:
        tower = VisionTransformer(
            img_size=image_size, patch_size=16, embed_dim=128, depth=2, num_heads=2
        )
        return tower, 128

    blip_pretrain.create_vit = small_vit
    blip_pretrain.init_tokenizer = lambda: BertTokenizer(str(folder / "vocab.txt"))
    hidden = json.loads((folder / "med_config.json").read_text())["hidden_size"]
    own_mlp = package.MLP
    package.MLP = lambda _: own_mlp(hidden)
    torch.manual_seed(0)
    model = package.ImageReward(str(folder / "med_config.json")).eval()
    for name, parameter in model.named_parameters():
        # As initialised, the head hardly looks at its input.
        size = 0.2 if name.startswith("mlp.") else 0.05
        parameter.data += size * torch.randn_like(parameter)
    torch.save(model.state_dict(), folder / "ImageReward.pt")
    prompts = json.loads((folder / "prompts.json").read_text())
    with torch.no_grad():
        scores = [
            [model.score(prompt, Image.open(file)) for prompt in prompts]
            for file in sorted(folder.glob("*.png"))
        ]
    (folder / "scores.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
