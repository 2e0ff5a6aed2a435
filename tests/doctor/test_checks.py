"""What each check says of facts that are good or bad, without a cluster."""

import hashlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g2rpo_ray.cluster.demand import Node
from g2rpo_ray.common.paths import resolve_path
from g2rpo_ray.config import load_config
from g2rpo_ray.doctor.checks.attention import check_flash3, flash3_problem, judge_flash3
from g2rpo_ray.doctor.checks.clock import judge_clock
from g2rpo_ray.doctor.checks.hardware import check_hardware
from g2rpo_ray.doctor.checks.limits import check_limits
from g2rpo_ray.doctor.checks.models import digests, judge_digests, model_problems
from g2rpo_ray.doctor.checks.room import check_room
from g2rpo_ray.doctor.checks.secrets import check_secrets
from g2rpo_ray.doctor.checks.storage import check_space, most_states
from g2rpo_ray.doctor.checks.versions import check_versions
from g2rpo_ray.doctor.findings import Finding, Level, as_json, as_text, fail, ok, warn, worst
from g2rpo_ray.doctor.probe import Gpu, NodeFacts
from tests.disks import unreadable
from tests.tiny import QUICKSTART, copy_flux, tiny_config

H100 = Gpu("NVIDIA H100", "580.1", 81559, 4)
FACTS = NodeFacts(
    versions={"python": "3.12.1", "torch": "2.11", "cuda": "12.9", "g2rpo-ray": "0.1"},
    source="aaaa",
    gpus=[H100, H100],
    memory_gib=100.0,
    memory_free_gib=80.0,
    shm_gib=60.0,
    object_store_gib=30.0,
    open_files=65536,
)


def node(gpus: float = 2.0, free: float = 2.0) -> Node:
    return Node("id", "10.0.0.1", {}, {"CPU": 8.0, "GPU": gpus}, {"CPU": 8.0, "GPU": free})


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level > Level.OK]


def test_good_facts_give_no_complaint() -> None:
    facts = {"a": FACTS, "b": FACTS}
    nodes = {"a": node(), "b": node()}
    assert bad([*check_versions(facts), *check_hardware(nodes, facts), *check_limits(facts)]) == []
    assert bad(judge_clock({"a": (0.001, 0.0), "b": (0.3, 0.9)})) == []


def test_versions_and_source_that_differ() -> None:
    other = replace(FACTS, versions=FACTS.versions | {"torch": "2.14"})
    edited = replace(FACTS, source="bbbb")
    first, second = bad(check_versions({"a": FACTS, "b": other, "c": edited}))
    assert (first.level, first.what) == (Level.FAIL, "b differs from a: torch 2.14 (not 2.11)")
    assert "c has other source files" in second.what


@pytest.mark.parametrize(
    ("rays", "facts", "level", "what"),
    [
        (8.0, FACTS, Level.FAIL, "Ray counts 8 GPUs and nvidia-smi shows 2"),
        (1.0, replace(FACTS, gpus=None), Level.FAIL, "Ray counts 1 GPUs and nvidia-smi shows 0"),
        (2.0, replace(FACTS, versions=FACTS.versions | {"cuda": "none"}), Level.FAIL,
         "torch is built without CUDA"),
        (2.0, replace(FACTS, gpus=[H100, replace(H100, used_mib=40960)]), Level.WARN,
         "in use on cards that are free to Ray (1: 40.0 GiB)"),
        (2.0, replace(FACTS, memory_free_gib=5.0), Level.WARN, "5.0 of 100.0 GiB free"),
    ],
)  # fmt: skip
def test_hardware_that_is_odd(rays: float, facts: NodeFacts, level: Level, what: str) -> None:
    (finding,) = bad(check_hardware({"a": node(rays, rays)}, {"a": facts}))
    assert finding.level == level
    assert what in finding.what


def test_memory_of_a_card_that_a_run_uses_is_no_complaint() -> None:
    used = replace(FACTS, gpus=[H100, replace(H100, used_mib=40960)])
    assert bad(check_hardware({"a": node(2.0, free=1.0)}, {"a": used})) == []


@pytest.mark.parametrize(
    ("facts", "check"),
    [
        (replace(FACTS, object_store_gib=0.1), "object store"),
        (replace(FACTS, shm_gib=0.06), "shared memory"),
        (replace(FACTS, open_files=1024), "open files"),
    ],
)
def test_limits_that_are_low(facts: NodeFacts, check: str) -> None:
    (finding,) = bad(check_limits({"a": facts}))
    assert (finding.check, finding.level) == (check, Level.WARN)


def test_unlimited_open_files_are_enough() -> None:
    assert bad(check_limits({"a": replace(FACTS, open_files=-1)})) == []


def test_clocks() -> None:
    findings = bad(judge_clock({"a": (0.001, 0.0), "b": (0.001, -2.5), "c": (0.001, 400.0)}))
    assert [(finding.level, finding.what) for finding in findings] == [
        (Level.WARN, "b: its clock is -2.50 s off"),
        (Level.FAIL, "c: its clock is +400.00 s off"),
    ]


def test_room(tmp_path: Path) -> None:
    free = node()
    assert bad(check_room(tiny_config(tmp_path), [free])) == []
    large = tiny_config(tmp_path, "learner.gpus_per_rank=2")
    (finding,) = bad(check_room(large, [free]))
    assert finding.level == Level.FAIL
    assert "learner.ranks=2 asks for 4" in finding.remedy
    (finding,) = bad(check_room(large, [free], grows=True))
    assert finding.level == Level.WARN
    for part in ("an autoscaler may add nodes", "waits 360 s", "learner.ranks=2 asks for 4"):
        assert part in finding.remedy
    assert bad(check_room(tiny_config(tmp_path), [free], grows=True)) == []
    (finding,) = bad(check_room(tiny_config(tmp_path, "learner.gpus_per_rank=1"), [node(free=1.0)]))
    assert finding.level == Level.WARN
    (finding,) = bad(check_room(tiny_config(tmp_path, "cluster.min_nodes=2"), [free]))
    assert "cluster.min_nodes is 2" in finding.what


def test_a_missing_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tiny_config(tmp_path, "tracking.wandb_project=mine")
    assert any("no WANDB_API_KEY" in finding.what for finding in bad(check_secrets(config)))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password hush")
    findings = check_secrets(config)
    assert not any("no WANDB_API_KEY" in finding.what for finding in findings)
    assert "hush" not in as_text(findings)


@pytest.mark.parametrize(("mode", "level"), [("offline", Level.OK), ("online", Level.FAIL)])
def test_wandb_offline_needs_no_key(
    mode: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    assert worst(check_secrets(tiny_config(tmp_path, "tracking.wandb_project=mine"))) == level


def test_space_for_checkpoints(tmp_path: Path) -> None:
    # 1.86 M parameters of the tiny model, 12 bytes each.
    few = check_space(tiny_config(tmp_path), tmp_path)
    assert few.level == Level.OK
    many = ["checkpoint.keep_last=1000000000"]
    finding = check_space(tiny_config(tmp_path, *many), tmp_path)
    assert finding.level == Level.FAIL
    assert "checkpoints want up to 20827531.9 GiB" in finding.what
    finding = check_space(tiny_config(tmp_path, *many, "learner.ema_decay=0.9"), tmp_path)
    assert "checkpoints want up to 27770042.5 GiB" in finding.what


@pytest.mark.parametrize("model", [[], ["model.path=/nowhere/flux"]])
@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc here")
def test_space_of_a_file_system_that_has_none(tmp_path: Path, model: list[str]) -> None:
    finding = check_space(tiny_config(tmp_path, *model), Path("/proc"))
    assert finding.level == Level.WARN
    assert finding.what.startswith("/proc: free space not known")


def test_space_of_a_model_that_is_not_there_yet(tmp_path: Path) -> None:
    # LoRA of rank 64 on FLUX.1-dev: 261,488,640 parameters, and a state takes 12 bytes of each.
    recipe = load_config(QUICKSTART.with_name("flux_g2rpo_hps_lora.yaml"), [f"run_dir={tmp_path}"])
    states = most_states(recipe)
    assert (
        f"want up to {states * 261_488_640 * 12 / 2**30:.1f} GiB"
        in check_space(recipe, tmp_path).what
    )


def test_space_of_a_broken_model_is_unknown(tmp_path: Path) -> None:
    flux = copy_flux(tmp_path / "flux")
    (flux / "transformer" / "config.json").write_text("{")
    finding = check_space(tiny_config(tmp_path, f"model.path={flux}"), tmp_path)
    assert finding.level == Level.WARN
    assert "is unknown" in finding.what


@pytest.mark.parametrize(
    ("settings", "states"),
    [
        (["snapshot_every=0"], 3 + 1),
        (["snapshot_every=5"], 3 + 2 + 1),
        (["snapshot_every=0", "best=clip"], 3 + 1 + 1),
    ],
)
def test_states_on_the_disk_are_counted(tmp_path: Path, settings: list[str], states: int) -> None:
    settings = [f"checkpoint.{setting}" for setting in ("keep_last=3", "every=1", *settings)]
    assert most_states(tiny_config(tmp_path, "evaluation.every=1", *settings)) == states
    beside = tiny_config(tmp_path, "evaluation.every=1", "evaluation.workers=1", *settings)
    assert most_states(beside) == states + ("checkpoint.best=clip" in settings)


def test_model_files(tmp_path: Path) -> None:
    flux = copy_flux(tmp_path / "flux")
    config = tiny_config(tmp_path, f"model.path={flux}")
    assert model_problems(config) == []
    whole = digests(config)

    weights = flux / "transformer" / "diffusion_pytorch_model.safetensors"
    index = weights.with_name("diffusion_pytorch_model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"x": "part-1.safetensors"}}))
    assert "either could be meant" in model_problems(config)[0]
    whole_file = weights.rename(weights.with_name("part-1.safetensors"))
    index.write_text(json.dumps({"weight_map": {"x": whole_file.name, "y": "part-2.safetensors"}}))
    (problem,) = model_problems(config)
    assert problem.startswith(f"{index.parent}/part-2.safetensors: missing; {index.name} names it")
    index.write_text("{}")
    assert "not an index of weights" in model_problems(config)[0]
    index.unlink()
    whole_file.rename(weights)

    config_file = flux / "text_encoder_2" / "config.json"
    text = config_file.read_text()
    config_file.write_text(json.dumps(json.loads(text) | {"quantization_config": {}}))
    assert f"{config_file}: quantization_config names" in model_problems(config)[0]
    config_file.write_text(text)

    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (weights.parent / "SHA256SUMS").write_text(f"{digest}  {weights.name}\n")
    assert model_problems(config) == []
    tensors = load_file(weights)
    first = next(iter(tensors))
    tensors[first] = tensors[first] + 1
    save_file(tensors, weights)
    assert model_problems(config) == [
        f"{weights}: its checksum is not the one in {weights.parent}/SHA256SUMS"
    ]
    (finding,) = judge_digests({"a": whole, "b": digests(config)})
    assert finding.what.startswith("b has other files than a: flux/transformer/SHA256SUMS, ")

    weights.write_bytes(weights.read_bytes()[:-8])
    assert any("cut short" in problem for problem in model_problems(config))


def test_a_folder_of_a_model_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flux = copy_flux(tmp_path / "flux")
    config = tiny_config(tmp_path, f"model.path={flux}")
    for name in (".cache", "more"):
        (flux / name).mkdir()
        (flux / name / "file").touch()
    assert not any(".cache" in name for name in digests(config))
    unreadable(monkeypatch, flux / "more")
    for look in (digests, model_problems):
        with pytest.raises(PermissionError, match=f"{flux}/more"):
            look(config)


def test_a_rewards_file_that_is_missing(tmp_path: Path) -> None:
    scorer = "{kind: clip, options: {architecture: 'local-dir:/no/clip'}}"
    config = tiny_config(tmp_path, f"rewards={{clip: {scorer}}}")
    assert model_problems(config) == ["rewards.clip.options.architecture: /no/clip is not there"]


def test_tokenizers_without_their_vocabulary(tmp_path: Path) -> None:
    flux = copy_flux(tmp_path / "flux")
    clip = Path(shutil.copytree(resolve_path("tiny_world:clip"), tmp_path / "clip"))
    settings = [f"model.path={flux}", f"rewards.clip.options.architecture=local-dir:{clip}"]
    config = tiny_config(tmp_path / "run", *settings)
    assert model_problems(config) == []
    (flux / "tokenizer_2" / "tokenizer.json").unlink()
    (clip / "tokenizer.json").unlink()
    model, reward = model_problems(config)
    assert f"{flux}/tokenizer_2: the vocabulary is missing" in model
    assert f"rewards.clip: {clip}: the vocabulary is missing" in reward


def test_a_recipes_reward_files_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Its paths are relative to where it is started.
    monkeypatch.chdir(tmp_path)
    config = load_config(QUICKSTART.with_name("flux_g2rpo_hps_clip_lora.yaml"))
    checkpoint = tmp_path / "models" / "HPS_v2.1_compressed.pt"
    assert f"rewards.hps.options.checkpoint: {checkpoint} is not there" in model_problems(config)
    checkpoint.parent.mkdir()
    checkpoint.touch()
    found = model_problems(config)
    assert any(f"rewards.hps: {checkpoint}: damaged, or no checkpoint" in it for it in found)
    torch.save({}, checkpoint)
    (problem,) = [p for p in model_problems(config) if p.startswith("rewards.")]
    assert problem.startswith("rewards.clip.options.architecture: ")


def test_the_report_counts_and_its_worst_is_the_exit_code() -> None:
    findings = [ok("a", "fine"), warn("long name", "slow", "hurry"), fail("c", "broken", "mend")]
    assert as_text(findings).splitlines() == [
        "OK    a          fine",
        "WARN  long name  slow",
        "                 -> hurry",
        "FAIL  c          broken",
        "                 -> mend",
        "1 OK, 1 WARN, 1 FAIL",
    ]
    assert [int(worst(findings[:n])) for n in (1, 2, 3)] == [0, 1, 2]
    assert as_json(findings)["findings"][1] == {
        "check": "long name", "level": "WARN", "what": "slow", "remedy": "hurry",
    }  # fmt: skip
    with pytest.raises(ValueError, match="needs a remedy"):
        fail("c", "broken", "")


def test_flash3_is_looked_for_where_it_is_asked_for() -> None:
    config = load_config(QUICKSTART)
    assert check_flash3(config, {"a": node()}, {"a": FACTS}, {}) == []
    assert judge_flash3({"a": None, "b": None}) == [ok("attention", "flash3 on 2 nodes")]
    # Scorers may be on the other one.
    (one,) = judge_flash3({"a": None, "b": "not installed"})
    assert (one.level, one.what) == (Level.WARN, "b: not installed")
    assert [f.level for f in judge_flash3({"a": "no", "b": "no"})] == [Level.FAIL] * 2


def test_flash3_needs_its_package_and_hopper_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(
        tmp_path, "rollout.attention=flash3", "model.dtype=bfloat16", "rollout.gpus_per_worker=1"
    )
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    assert "fa3-fwd is not installed" in str(flash3_problem(config))
    monkeypatch.setattr("g2rpo_ray.doctor.checks.attention.check_attention", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    smi = tmp_path / "nvidia-smi"
    smi.touch(0o755)
    smi.write_text("#!/bin/sh\necho 9.0\necho 9.0\n")
    assert flash3_problem(config) is None
    smi.write_text("#!/bin/sh\necho 9.0\necho 8.0\n")
    assert flash3_problem(config) == (
        "cards of compute capability 8.0; flash3 is for 9.0 (H100, H200)"
    )
    smi.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    assert flash3_problem(config) == "nvidia-smi fails: no driver"
