"""Adapters of other programs: each scheme gives exactly its own B A, or is refused by its name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor

from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import ModelSection
from g2rpo_ray.maths import noise
from g2rpo_ray.models.adapters import adapter_at, load_adapter
from g2rpo_ray.models.families import open_family
from g2rpo_ray.models.family import ModelFolderError
from g2rpo_ray.models.loading import load_part

FAMILY = open_family(resolve_path("tiny_world:flux"))
DOUBLE, SINGLE = "transformer_blocks.0.", "single_transformer_blocks.1."
RANKS = {DOUBLE + "attn.to_q": 4, DOUBLE + "ff.net.2": 2, SINGLE + "proj_out": 4}
Factors = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture
def transformer() -> Any:
    return load_part(ModelSection(path="tiny_world:flux"), "transformer", torch.float32)


def factors_of(transformer: Any, ranks: dict[str, int] = RANKS) -> Factors:
    """A and B of some modules."""
    found = {}
    for name, rank in ranks.items():
        out, taken = transformer.get_submodule(name).weight.shape
        shapes = {"A": (rank, taken), "B": (out, rank)}
        down, up = (noise.normal(shape, name, half) for half, shape in shapes.items())
        found[name] = (down, up)
    return found


def named(factors: Factors, name: str, halves: tuple[str, str]) -> dict[str, Tensor]:
    """Tensors of a file; ``name`` has a place for the module's."""
    return {
        name.format(module) + half: tensor
        for module, pair in factors.items()
        for half, tensor in zip(halves, pair, strict=True)
    }


AB, DOWN_UP = (".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")


def loaded(transformer: Any, path: Path) -> dict[str, Tensor]:
    """What every adapted layer adds to its weight."""
    load_adapter(transformer, path, FAMILY)
    return {
        name: layer.get_delta_weight("default")
        for name, layer in transformer.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }


def assert_exact(found: dict[str, Tensor], factors: Factors, scale: dict[str, float]) -> None:
    assert found.keys() == factors.keys()
    for name, (down, up) in factors.items():
        expected = scale.get(name, 1.0) * (up.double() @ down.double())
        assert torch.allclose(found[name].double(), expected, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize(
    ("name", "halves"),
    [
        ("transformer.{}", AB),
        ("{}", AB),
        ("diffusion_model.{}", AB),
        ("diffusion_model.{}", DOWN_UP),
        ("transformer.{}", DOWN_UP),
        ("transformer.{}", (".lora.down.weight", ".lora.up.weight")),
    ],
)
def test_names_of_several_programs_under_any_file_name(
    transformer: Any, tmp_path: Path, name: str, halves: tuple[str, str]
) -> None:
    factors = factors_of(transformer)
    file = tmp_path / "my_style_v1.safetensors"
    save_file(named(factors, name, halves), file)
    assert adapter_at(tmp_path) == file
    assert_exact(loaded(transformer, tmp_path), factors, {})


@pytest.mark.parametrize("name", ["transformer.{}", "diffusion_model.{}", "flat"])
def test_alpha_of_each_module_is_its_scale_times_the_rank(
    transformer: Any, tmp_path: Path, name: str
) -> None:
    factors = factors_of(transformer)
    by_name = factors
    if name == "flat":
        name = "lora_transformer_{}"
        by_name = {module.replace(".", "_"): pair for module, pair in factors.items()}
    tensors = named(by_name, name, DOWN_UP)
    alphas = dict(zip(RANKS, (8.0, 0.7, 1.0), strict=True))
    for module, alpha in zip(by_name, alphas.values(), strict=True):
        tensors[name.format(module) + ".alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "a.safetensors")
    scales = {module: alpha / RANKS[module] for module, alpha in alphas.items()}
    assert_exact(loaded(transformer, tmp_path / "a.safetensors"), factors, scales)


@pytest.mark.parametrize("rank_stabilised", [False, True])
@pytest.mark.parametrize("place", ["beside", "header"])
def test_pefts_scale_is_in_its_settings(
    transformer: Any, tmp_path: Path, place: str, rank_stabilised: bool
) -> None:
    factors = factors_of(transformer)
    settings = {
        "r": 4, "lora_alpha": 10, "rank_pattern": {"ff.net.2": 2},
        "alpha_pattern": {"transformer_blocks.0.ff.net.2": 3}, "use_rslora": rank_stabilised,
        "init_lora_weights": True,
    }  # fmt: skip
    if place == "beside":
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | settings))
        tensors, metadata = named(factors, "base_model.model.{}", AB), None
        file = tmp_path / "adapter_model.safetensors"
    else:
        flat = {f"transformer.{key}": value for key, value in settings.items()}
        tensors, metadata = named(factors, "transformer.{}", AB), json.dumps(flat)
        file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(tensors, file, {"lora_adapter_metadata": metadata} if metadata else None)
    alphas = {DOUBLE + "ff.net.2": 3}
    power = 0.5 if rank_stabilised else 1
    scales = {module: alphas.get(module, 10) / rank**power for module, rank in RANKS.items()}
    assert_exact(loaded(transformer, tmp_path), factors, scales)


@pytest.mark.parametrize(
    ("name", "halves"),
    [
        ("lora_unet_{}", DOWN_UP),
        ("diffusion_model.{}", AB),
        ("base_model.model.{}", AB),
        ("{}", AB),
    ],
)
def test_the_names_of_the_models_authors_join_layers(
    transformer: Any, tmp_path: Path, name: str, halves: tuple[str, str]
) -> None:
    wanted = {
        "double_blocks.0.img_attn.qkv": [DOUBLE + f"attn.to_{part}" for part in "qkv"],
        "double_blocks.0.txt_attn.qkv": [DOUBLE + f"attn.add_{part}_proj" for part in "qkv"],
        "double_blocks.0.img_mlp.0": [DOUBLE + "ff.net.0.proj"],
        "double_blocks.0.txt_mod.lin": [DOUBLE + "norm1_context.linear"],
        "single_blocks.1.linear2": [SINGLE + "proj_out"],
        "img_in": ["x_embedder"],
        "final_layer.adaLN_modulation.1": ["norm_out.linear"],
    }
    joined: Factors = {}
    factors: Factors = {}
    alphas: dict[str, float] = {}
    for number, (theirs, ours) in enumerate(wanted.items()):
        apart = factors_of(transformer, dict.fromkeys(ours, 4))
        down = apart[ours[0]][0]
        joined[theirs] = (down, torch.cat([up for _, up in apart.values()]))
        factors |= {module: (down, up) for module, (_, up) in apart.items()}
        if theirs.startswith("final_layer"):
            # The authors have shift before scale, diffusers scale before shift.
            shift, scale = apart[ours[0]][1].chunk(2)
            factors[ours[0]] = (down, torch.cat([scale, shift]))
        alphas[theirs] = 3.0 + number
    flat = "lora_unet" in name
    by_name = {(m.replace(".", "_") if flat else m): pair for m, pair in joined.items()}
    tensors = named(by_name, name, halves)
    for module, alpha in zip(by_name, alphas.values(), strict=True):
        tensors[name.format(module) + ".alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "a.safetensors")
    scales = {ours: alphas[theirs] / 4 for theirs, parts in wanted.items() for ours in parts}
    assert_exact(loaded(transformer, tmp_path), factors, scales)


def test_a_single_block_of_true_width_is_divided_in_four(tmp_path: Path) -> None:
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(num_layers=0, num_single_layers=1, in_channels=64)
    transformer = transformer.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
    block = "single_transformer_blocks.0."
    parts = [*(block + f"attn.to_{part}" for part in "qkv"), block + "proj_mlp"]
    apart = factors_of(transformer, dict.fromkeys(parts, 2))
    down = apart[parts[0]][0].bfloat16()
    ups = [up.bfloat16() for _, up in apart.values()]
    joined = {"lora_unet_single_blocks_0_linear1": (down, torch.cat(ups))}
    save_file(named(joined, "{}", DOWN_UP), tmp_path / "a.safetensors")
    load_adapter(transformer, tmp_path, FAMILY)
    for part, up in zip(parts, ups, strict=True):
        layer = transformer.get_submodule(part)
        assert torch.equal(layer.lora_B["default"].weight, up), part
        assert torch.equal(layer.lora_A["default"].weight, down), part


def test_what_an_adapter_leaves_untouched_stays(transformer: Any, tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in transformer.state_dict().items()}
    save_file(named(factors_of(transformer), "{}", AB), tmp_path / "a.safetensors")
    load_adapter(transformer, tmp_path, FAMILY)
    after = {n.replace(".base_layer", ""): w for n, w in transformer.state_dict().items()}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


Q = DOUBLE + "attn.to_q"
ONE = torch.ones(1)
KINDS = {
    f"transformer.{Q}.lora_magnitude_vector": "DoRA",
    f"transformer.{Q}.dora_scale": "DoRA",
    f"transformer.{Q}.lokr_w1": "LoKr",
    f"transformer.{Q}.hada_w1_a": "LoHa",
    f"transformer.{Q}.oft_blocks": "OFT",
    f"transformer.{Q}.diff": "whole differences",
    f"transformer.{Q}.diff_b": "whole differences",
    f"transformer.{Q}.lora_B.bias": "biases",
    "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": "a text encoder",
    "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_A.weight": "a text encoder",
    f"transformer.{SINGLE}attn.to_k.alpha": "lack a factor",
    f"transformer.{SINGLE}attn.to_k.lora_A.weight": "lack a factor",
    "transformer.blocks.0.qkv.lora_A.weight": "lack a factor",
}


@pytest.mark.parametrize("name", KINDS)
def test_what_could_not_be_taken_whole_is_refused(
    transformer: Any, tmp_path: Path, name: str
) -> None:
    tensors = named(factors_of(transformer), "transformer.{}", AB)
    save_file(tensors | {name: torch.ones(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelFolderError, match=KINDS[name]) as caught:
        load_adapter(transformer, tmp_path, FAMILY)
    assert name.partition(".lora_A")[0].removesuffix(".alpha") in str(caught.value)
    assert not hasattr(transformer, "peft_config")


@pytest.mark.parametrize(
    ("module", "scheme"),
    [
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", "kohya's names"),
        ("diffusion_model.joint_blocks.0.x_block.attn.qkv", "ComfyUI's names"),
        ("unet.down_blocks.0.attentions.0.proj_in", "names of no known scheme"),
    ],
)
def test_another_models_adapter_is_told_with_its_scheme(
    transformer: Any, tmp_path: Path, module: str, scheme: str
) -> None:
    factors = {module: (torch.ones(2, 8), torch.ones(24, 2))}
    save_file(named(factors, "{}", DOWN_UP), tmp_path / "a.safetensors")
    with pytest.raises(ModelFolderError, match=re.escape(module)) as caught:
        load_adapter(transformer, tmp_path, FAMILY)
    assert scheme in str(caught.value)
    assert "FluxPipeline" in str(caught.value)


def test_an_adapter_of_a_wider_model_is_told(transformer: Any, tmp_path: Path) -> None:
    factors = {Q: (torch.ones(2, 8), torch.ones(24, 2))}
    save_file(named(factors, "transformer.{}", AB), tmp_path / "a.safetensors")
    with pytest.raises(ModelFolderError, match=re.escape(f"{Q} has factors [24, 2] and [2, 8]")):
        load_adapter(transformer, tmp_path, FAMILY)


def test_pefts_names_without_its_settings_have_no_scale(transformer: Any, tmp_path: Path) -> None:
    save_file(named(factors_of(transformer), "base_model.model.{}", AB), tmp_path / "a.safetensors")
    with pytest.raises(ModelFolderError, match=r"names of peft.*adapter_config\.json"):
        load_adapter(transformer, tmp_path, FAMILY)


@pytest.mark.parametrize(
    ("change", "named_key"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"lora_alpha": "8"}, "no number lora_alpha"),
    ],
)
def test_settings_of_peft_that_are_not_plain_lora(
    transformer: Any, tmp_path: Path, change: dict[str, object], named_key: str
) -> None:
    file = tmp_path / "adapter_model.safetensors"
    save_file(named(factors_of(transformer), "base_model.model.{}", AB), file)
    settings = {"peft_type": "LORA", "lora_alpha": 8, "init_lora_weights": True} | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFolderError, match=named_key):
        load_adapter(transformer, tmp_path, FAMILY)


def test_a_folder_of_several_things_is_not_guessed_at(transformer: Any, tmp_path: Path) -> None:
    tensors = named(factors_of(transformer), "transformer.{}", AB)
    for name in ("a", "b"):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelFolderError, match=r"name one of a\.safetensors, b\.safetensors"):
        adapter_at(tmp_path)
    own = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(tensors, own)
    assert adapter_at(tmp_path) == own
    save_file({"x": ONE}, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ModelFolderError, match="name one of pytorch_lora_weights"):
        adapter_at(tmp_path)
