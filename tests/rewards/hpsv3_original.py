"""Runs in an environment of hpsv3 1.0.0 and the transformers of its time: the package's own scores
of the pictures in a folder. Argument: the folder."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

CHANGED = {"report_to": "none", "use_cpu": True, "gradient_checkpointing": False}
"""Settings for training that its file has and this machine may not."""


def load_package() -> Any:
    """hpsv3.inference, without what its modules import for training."""
    unused: dict[str, dict[str, Any]] = {
        "fire": {},
        "datasets": {"Dataset": object},
        "peft": dict.fromkeys(("PeftModel", "LoraConfig", "get_peft_model")),
        "trl": {
            "RewardTrainer": object,
            "get_kbit_device_map": lambda: None,
            "get_quantization_config": lambda _: None,
        },
    }
    # transformers asks what there is, with the modules' files.
    import transformers.trainer  # noqa: F401

    for name, content in unused.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(content)
    import hpsv3.inference

    return hpsv3.inference


def write_base(folder: Path) -> Path:
    """Qwen2-VL as published, which the package starts from: as many rows as config.json says."""
    base = folder / "base"
    base.mkdir(exist_ok=True)
    for file in (*folder.glob("*.json"), *folder.glob("*.txt")):
        (base / file.name).write_bytes(file.read_bytes())
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    (base / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    state = load_file(folder / "HPSv3.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.nn.functional.pad(state[name], (0, 0, 0, rows - len(state[name])))
    weights = {name: tensor for name, tensor in state.items() if not name.startswith("rm_head")}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    return base


def main(folder: Path) -> None:
    package = load_package()
    own = Path(package.__file__).parent / "config" / "HPSv3_7B.yaml"
    settings = yaml.safe_load(own.read_text()) | CHANGED
    settings["model_name_or_path"] = str(write_base(folder))
    del settings["eval_strategy"]
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    scorer = package.HPSv3RewardInferencer(
        str(folder / "settings.yaml"), str(folder / "HPSv3.safetensors"), device="cpu"
    )
    # To float32 what is no rounding of the model's own: positions stay as bfloat16 left them.
    scorer.model.float()
    scorer.model.visual.rotary_pos_emb.bfloat16()
    prompts = json.loads((folder / "prompts.json").read_text())
    with torch.inference_mode():
        scores = [
            scorer.reward([str(file)] * len(prompts), prompts)[:, 0].tolist()
            for file in sorted(folder.glob("*.png"))
        ]
    (folder / "scores.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
