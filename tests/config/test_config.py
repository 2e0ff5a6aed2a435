"""Settings: what is wrong is named with file, key, value and what is allowed."""

from pathlib import Path

import pytest

from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import Config, load_config, save_config
from g2rpo_ray.config.rollout import SPEEDS
from tests.tiny import QUICKSTART


def quickstart(*overrides: str) -> Config:
    # Counts that go with many others, for combinations that are to be possible or not.
    counts = ["sampling.members=8", "learner.steps_per_pass=1"]
    return load_config(QUICKSTART, [*counts, *overrides])


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        quickstart(*overrides)
    return str(caught.value)


def error_of_text(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def test_missing_file_is_named_with_the_folder_that_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config("configs/quick.yaml")
    assert "configs/quick.yaml: no such configuration file" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_in_place_of_a_file_is_pointed_into(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is a folder.*{tmp_path}/config.yaml"):
        load_config(tmp_path)


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"seed: \xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_not_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    message = error_of_text(tmp_path / "run.yaml", "seed: 1\niterations: [1, 2\n")
    assert "run.yaml: not valid YAML" in message
    assert "line" in message


@pytest.mark.parametrize(
    ("text", "found"), [("- seed\n- 1\n", "['seed', 1]"), ("hello", "'hello'"), ("", "None")]
)
def test_anything_but_settings(tmp_path: Path, text: str, found: str) -> None:
    message = error_of_text(tmp_path / "run.yaml", text)
    assert "run.yaml: expected settings as 'key: value' lines" in message
    assert found in message


def test_doubled_key_is_named_with_its_line(tmp_path: Path) -> None:
    text = QUICKSTART.read_text() + "\nseed: 7\n"
    message = error_of_text(tmp_path / "run.yaml", text)
    assert "key 'seed' stands here twice" in message
    assert f"line {len(text.splitlines())}" in message


@pytest.mark.parametrize("text", ["{{ run_dir }}", "{[a]: b}"])
def test_a_template_that_was_not_filled_in(tmp_path: Path, text: str) -> None:
    message = error_of_text(tmp_path / "run.yaml", f"seed: 1\nrun_dir: {text}\n")
    assert "run.yaml: not valid YAML" in message
    assert "a key must be plain text; is this a template that was not filled in?" in message
    assert "line 2, column 11" in message


def test_what_looks_like_a_date_and_is_none(tmp_path: Path) -> None:
    message = error_of_text(tmp_path / "run.yaml", "run_dir: 2026-11-31\n")
    assert "run.yaml: not valid YAML" in message


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("itterations=5", "itterations", "5"),
        ("learner.lr=1", "learner.lr", "1"),
        ("rewards.clip.wait=2", "rewards.clip.wait", "2"),
        ("telemetry.level=high", "telemetry", "{'level': 'high'}"),
    ],
)
def test_unknown_key(override: str, key: str, value: str) -> None:
    message = error_of(override)
    assert f"{key}: unknown key (value {value})" in message
    assert str(QUICKSTART) in message


@pytest.mark.parametrize(
    ("override", "key", "allowed", "found"),
    [
        ("seed=one", "seed", "valid integer", "'one'"),
        ("seed=-1", "seed", "greater than or equal to 0", "-1"),
        # Beyond what PyTorch's generators and the names of checkpoints hold.
        (f"seed={2**63}", "seed", "less than", str(2**63)),
        ("iterations=1000000", "iterations", "less than 1000000", "1000000"),
        ("iterations=1.5", "iterations", "valid integer", "1.5"),
        ("iterations=true", "iterations", "valid integer", "True"),
        ("run_dir=5", "run_dir", "valid string", "5"),
        ("model.dtype=float16", "model.dtype", "'float32' or 'bfloat16'", "'float16'"),
        ("sampling.sde=wiggle", "sampling.sde", "'flow'", "'wiggle'"),
        ("learner.zero_stage=4", "learner.zero_stage", "1, 2 or 3", "4"),
        ("learner.learning_rate=0", "learner.learning_rate", "greater than 0", "0"),
        ("sampling.eta=.inf", "sampling.eta", "finite number", "inf"),
        ("learner.beta1=1", "learner.beta1", "less than 1", "1"),
        ("g2rpo.sde_steps=3", "g2rpo.sde_steps", "valid list", "3"),
        ("g2rpo.sde_steps=[]", "g2rpo.sde_steps", "at least 1 item", "[]"),
        ("rollout=fast", "rollout", "valid dictionary", "'fast'"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(
    override: str, key: str, allowed: str, found: str
) -> None:
    line = next(line for line in error_of(override).splitlines() if line.strip().startswith(key))
    assert line.startswith(f"  {key}: ")
    assert allowed in line
    assert f"(got {found})" in line


def test_every_problem_is_named_at_once() -> None:
    message = error_of("seed=one", "learner.lr=1", "sampling.steps=1")
    assert all(key in message for key in ("seed: ", "learner.lr: ", "sampling.steps: "))


def test_missing_setting(tmp_path: Path) -> None:
    lines = QUICKSTART.read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("iterations:"))
    message = error_of_text(tmp_path / "run.yaml", text)
    assert "iterations: missing, it has no default" in message


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".1e-3", "+1e-4"])
def test_scientific_notation_is_a_number(text: str) -> None:
    assert quickstart(f"learner.learning_rate={text}").learner.learning_rate == 1e-4


@pytest.mark.parametrize("text", ["1e", "e4", "1e-4x", "'1e-4'"])
def test_what_only_looks_like_a_number_is_refused(text: str) -> None:
    assert "learner.learning_rate: Input should be a valid number" in error_of(
        f"learner.learning_rate={text}"
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["sampling.sde=cps", "sampling.eta=2"], ["eta is 2", "below 2"]),
        (["g2rpo.sde_steps=[0, 5]"], ["g2rpo.sde_steps has 5", "sampling.steps=6", "0 to 4"]),
        (["g2rpo.sde_steps=[-1]"], ["g2rpo.sde_steps has -1", "0 to 4"]),
        (["g2rpo.sde_steps=[1, 1]"], ["g2rpo", "sde_steps is [1, 1]", "twice"]),
        (["g2rpo.granularities=[0]"], ["g2rpo", "granularities has 0", "1 or more"]),
        (["g2rpo.granularities=[2, 2]"], ["g2rpo", "granularities is [2, 2]", "twice"]),
        (["rewards.hps.weight=0", "rewards.clip.weight=0"], ["every weight is 0"]),
        (
            ["rewards.hps.min_replicas=3", "rewards.hps.max_replicas=2"],
            ["rewards.hps", "max_replicas is 2", "min_replicas 3"],
        ),
        (
            ["rewards.hps.kind=hsp"],
            ["rewards.hps.kind", "'hsp'", "known are aesthetic, ", "oracle"],
        ),
        (["rewards.My-Reward.kind=oracle"], ["rewards.My-Reward", "a-z, 0-9 and _"]),
        (["rewards.hps.options.size=3"], ["rewards.hps.options", "size", "unknown key"]),
        (["rewards.hps.options={}"], ["rewards.hps.options", "checkpoint", "missing"]),
        (
            ["rewards.own.kind=python", "rewards.own.options.target=no_colon"],
            ["rewards.own.options", "target", "no_colon"],
        ),
        (["rewards.clip.beside=nobody"], ["rewards.clip.beside", "'nobody'", "hps"]),
        (
            ["rewards.hps.beside=clip", "rewards.hps.cpus_per_replica=1"],
            ["rewards.", "beside", "there is none"],
        ),
        (
            ["rewards.clip.threads=2", "rewards.clip.label_selector={a: b}"],
            ["rewards.clip", "label_selector, threads cannot be set", "beside 'hps'"],
        ),
        (["rewards={}"], ["rewards", "at least 1 item"]),
        (
            ["evaluation.workers=1", "evaluation.every=0"],
            ["evaluation.workers is 1", "evaluation.every is 0", "set every"],
        ),
        (["evaluation.patience=3"], ["evaluation.patience is 3", "checkpoint.best is not set"]),
        (["checkpoint.best=hsp"], ["checkpoint.best is 'hsp'", "clip, hps, oracle"]),
        (
            ["checkpoint.best=hps", "evaluation.every=5"],
            ["checkpoint.every is 18", "evaluation.every is 5", "a multiple"],
        ),
        (
            ["weight_sync.transport=nccl", "rollout.gpus_per_worker=0.5"],
            ["rollout.gpus_per_worker is 0.5", "no two members on one card", "half a GPU"],
        ),
        (
            ["weight_sync.transport=nccl", "rollout.gpus_per_worker=1", "learner.gpus_per_rank=0"],
            ["learner.gpus_per_rank is 0", "0 is the CPU", "cards for both or neither"],
        ),
        (["evaluation.min_gain=0.1"], ["evaluation.min_gain is 0.1", "patience is 0"]),
        (
            ["rollout.timeout_s=30"],
            ["rollout: min_deadline_s is 60 and timeout_s is 30", "at most timeout_s"],
        ),
        (
            ["learner.timeout_s=100"],
            ["learner: min_deadline_s is 120 and timeout_s is 100", "at most timeout_s"],
        ),
        (["learner.final_share=0.1"], ["final_share is 0.1", "schedule is constant"]),
        (
            ["algorithm=flow_grpo", "learner.steps_per_pass=2", "rollout.batch_size=4"],
            [
                "learner.steps_per_pass is 2",
                "a step of flow_grpo",
                "sampling.members is 8",
                "rollout.batch_size 4",
                "a batch_size of 8",
            ],
        ),
        (
            [
                "algorithm=dance_grpo",
                "learner.steps_per_pass=2",
                "rollout.batch_size=auto",
                "sampling.members=17",
            ],
            ["learner.steps_per_pass is 2", "rollout.batch_size auto"],
        ),
        (
            ["algorithm=diffusion_nft", "diffusion_nft.times_per_picture=7"],
            ["diffusion_nft.times_per_picture is 7", "sampling.steps is 6"],
        ),
        *(
            (["algorithm=diffusion_nft", f"learner.{key}={value}"], [f"learner.{key} is", use])
            for key, value, use in (
                ("update", "per_sde_step", "use learner.update=per_iteration"),
                ("ema_decay", 0.9, "use learner.ema_decay=null"),
                ("old_log_prob", "learner", "use learner.old_log_prob=rollout"),
                ("step_weight", "noise", "use learner.step_weight=uniform"),
                ("normalise_ratio", "true", "use learner.normalise_ratio=false"),
            )
        ),
        (
            ["algorithm=diffusion_nft", "rollout.fp8=true"],
            ["rollout.fp8 is true", "g2rpo and e_grpo"],
        ),
        (
            ["rollout.speed=fast", "rollout.fp8=false"],
            ["rollout: speed is fast, which sets fp8 to true, and fp8 is false", "speed: null"],
        ),
        (
            ["rollout.speed=balanced", "rollout.fp8_above_sigma=0.3"],
            ["rollout: speed is balanced, which sets fp8_above_sigma to 0.5, and", "is 0.3"],
        ),
        (
            ["rollout.speed=exact", "rollout.thin_completions=true"],
            ["rollout: speed is exact", "thin_completions to false", "thin_completions is true"],
        ),
        (
            ["algorithm=flow_grpo", "rollout.speed=balanced"],
            ["rollout.speed is balanced, which sets fp8", "algorithm is flow_grpo"],
        ),
        (
            ["g2rpo.granularities=[2]", "rollout.speed=fast"],
            ["rollout.speed is fast, which sets thin_completions", "granularities is [2]"],
        ),
        (
            ["rollout.speed=fast", "rollout.gpus_per_worker=1", "model.dtype=float32"],
            ["rollout.speed is fast, which sets fp8", "model.dtype is float32", "bfloat16"],
        ),
        (["rollout.speed=[fast]"], ["rollout.speed", "'exact', 'balanced' or 'fast'"]),
        (["algorithm=e_grpo"], ["e_grpo.first is 8", "0 to 4"]),
        (
            ["learner.updates_per_iteration=3"],
            ["learner.updates_per_iteration is 3", "sampling.members is 8", "divides them"],
        ),
        (
            ["learner.updates_per_iteration=2", "learner.update=per_sde_step"],
            ["learner: updates_per_iteration is 2", "use update: per_iteration"],
        ),
        (
            ["algorithm=mix_grpo", "mix_grpo.stride=2"],
            ["mix_grpo.stride is 2", "last place is 1", "would never move"],
        ),
        (["rollout.gpus_per_worker=1.5"], ["rollout.gpus_per_worker: 1.5 GPUs", "whole GPUs"]),
        (["learner.gpus_per_rank=2.5"], ["learner.gpus_per_rank: 2.5 GPUs", "whole GPUs"]),
        (
            ["learner.ranks=2", "learner.gpus_per_rank=0.5"],
            ["learner: ranks is 2", "gpus_per_rank is 0.5", "more than half a GPU"],
        ),
        (["rewards.hps.gpus_per_replica=1.1"], ["rewards.hps.gpus_per_replica: 1.1 GPUs"]),
        (["prompts.encoder_gpus=1.5"], ["prompts.encoder_gpus: 1.5 GPUs", "a share of one GPU"]),
        (["prompts.key=0"], ["prompts.key", "greater than or equal to 1 (got 0)"]),
        (["evaluation.min_gain=-0.1"], ["evaluation.min_gain", "greater than or equal to 0"]),
    ],
)
def test_impossible_combination(overrides: list[str], named: list[str]) -> None:
    message = error_of(*overrides)
    assert [part for part in named if part not in message] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.gpus_per_worker=0.9", "learner.gpus_per_rank=1", "prompts.encoder_gpus=0"],
        ["rollout.gpus_per_worker=2", "learner.gpus_per_rank=4.0"],
        ["learner.ranks=2", "learner.gpus_per_rank=0.51"],
        ["learner.ranks=1", "learner.gpus_per_rank=0.4"],
        ["rollout.timeout_s=30", "rollout.min_deadline_s=30"],
        ["learner.schedule=cosine", "learner.decay_updates=9", "learner.final_share=0.1"],
        # Members that share x_k, or fit into one batch, are one pass of a step.
        ["learner.steps_per_pass=2", "rollout.batch_size=4"],
        ["algorithm=flow_grpo", "learner.steps_per_pass=2", "rollout.batch_size=8"],
        [
            "algorithm=flow_grpo",
            "learner.steps_per_pass=2",
            "learner.updates_per_iteration=4",
            "rollout.batch_size=2",
        ],
        # Each has its own pipeline and members that share x_k.
        ["algorithm=diffusion_nft", "pipeline=one_step_off", "learner.zero_stage=3"],
        ["algorithm=e_grpo", "e_grpo.first=5", "learner.steps_per_pass=2", "rollout.batch_size=4"],
        ["algorithm=e_grpo", "e_grpo.first=5", "rollout.thin_completions=true"],
        # A window over the whole schedule has one place, whatever the stride.
        ["algorithm=mix_grpo", "mix_grpo.window=5"],
        ["algorithm=mix_grpo", "mix_grpo.window=3", "mix_grpo.stride=2"],
    ],
)
def test_what_only_looks_like_an_impossible_combination(overrides: list[str]) -> None:
    quickstart(*overrides)


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_speed_is_what_it_sets(speed: str, tmp_path: Path) -> None:
    settings = SPEEDS[speed]
    config = quickstart(f"rollout.speed={speed}")
    assert {key: getattr(config.rollout, key) for key in settings} == settings
    # By hand, or beside it in words that agree, it is the same and has the same name.
    by_hand = [f"rollout.{key}={str(value).lower()}" for key, value in settings.items()]
    same = quickstart(*by_hand)
    assert same.rollout.speed_in_words == config.rollout.speed_in_words
    assert config.rollout.speed_in_words.startswith(speed)
    assert quickstart(f"rollout.speed={speed}", *by_hand) == config
    save_config(config, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == config


def test_settings_that_are_no_named_speed_are_told_without_a_name() -> None:
    assert quickstart().rollout.speed_in_words == "exact"
    words = quickstart("rollout.fp8=true", "rollout.fp8_above_sigma=0.3").rollout.speed_in_words
    assert words == "float8 products above noise level 0.3"


@pytest.mark.parametrize("name", ["HF_TOKEN", "judge_api_key", "DB_PASSWORD"])
def test_a_secret_in_a_runtime_env_is_refused_and_not_repeated(name: str) -> None:
    message = error_of(f"rewards.hps.runtime_env.env_vars={{{name}: sk-123, LEVEL: '3'}}")
    assert f"rewards.hps.runtime_env.env_vars.{name} looks like a secret" in message
    assert "environment variable of the nodes" in message
    assert "sk-123" not in message


def test_a_runtime_env_may_hold_other_variables() -> None:
    config = quickstart("rewards.hps.runtime_env.env_vars={LEVEL: '3'}")
    assert config.rewards["hps"].runtime_env == {"env_vars": {"LEVEL": "3"}}
    message = error_of("rewards.hps.runtime_env.env_vars=[HF_TOKEN=1]")
    assert "runtime_env.env_vars must be names with their values" in message


def test_overrides_reach_into_sections_and_make_new_ones() -> None:
    config = quickstart("learner.ranks=1", "model.lora.rank=4", "g2rpo.sde_steps=[0, 2]", "seed=3")
    assert config.learner.ranks == 1
    assert config.model.lora is not None
    assert config.model.lora.rank == 4
    assert config.g2rpo.sde_steps == [0, 2]
    assert config.seed == 3
    assert config.sampling == quickstart().sampling


def test_the_last_of_two_overrides_counts() -> None:
    assert quickstart("seed=1", "seed=2").seed == 2


def test_a_value_may_hold_an_equals_sign() -> None:
    assert quickstart("run_dir=runs/lr=1e-4").run_dir == "runs/lr=1e-4"


@pytest.mark.parametrize(
    ("value", "path"), [("/runs/one two#3", "/runs/one two#3"), ('"/runs/try #2"', "/runs/try #2")]
)
def test_a_path_may_hold_blanks_and_hashes(value: str, path: str) -> None:
    assert quickstart(f"run_dir={value}").run_dir == path


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed", "expected key.sub=value"),
        ("=3", "expected key.sub=value"),
        ("seed.of=3", "seed is no section"),
        ("seed=[1", "not valid YAML"),
        ("run_dir=/runs/try #2", "begins a comment"),
        ("seed=1 # as before", "begins a comment"),
        ("run_dir=#2", "begins a comment"),
    ],
)
def test_override_of_wrong_form(override: str, named: str) -> None:
    message = error_of(override)
    assert repr(override) in message
    assert named in message


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        quickstart().seed = 1  # type: ignore[misc]


def test_saved_settings_read_back_equal(tmp_path: Path) -> None:
    config = quickstart("learner.learning_rate=3e-7", "model.lora.rank=4", "run_dir=läufe/eins")
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "share_frozen is true and lora is not set: weights that are trained"),
        (
            ("model.lora.rank=2", "learner.zero_stage=3"),
            "model.share_frozen is true and learner.zero_stage is 3, which splits",
        ),
    ],
)
def test_weights_that_are_trained_or_split_are_not_shared(
    overrides: tuple[str, ...], said: str
) -> None:
    assert said in error_of("model.share_frozen=true", *overrides)
    assert not quickstart(*overrides).shares_frozen


@pytest.mark.parametrize(
    ("shares", "worker", "rank", "workers", "stage"),
    [
        (True, 0.42, 0.44, 1, 2),
        (True, 0.5, 1, 2, 1),
        (False, 0.5, 1, 1, 2),
        (False, 0.9, 1, 4, 2),
        (False, 0.42, 0.44, 2, 3),
        # CPU roles only where they are told to.
        (False, 0, 0, 2, 2),
    ],
)
def test_adapters_share_a_card_where_two_roles_fit_on_it(
    shares: bool, worker: float, rank: float, workers: int, stage: int
) -> None:
    settings = (
        f"rollout.gpus_per_worker={worker}",
        f"learner.gpus_per_rank={rank}",
        f"rollout.workers={workers}",
        f"learner.zero_stage={stage}",
        "learner.ranks=1",
    )
    assert quickstart("model.lora.rank=2", *settings).shares_frozen is shares
    assert not quickstart("model.lora.rank=2", "model.share_frozen=false", *settings).shares_frozen
    assert not quickstart(*settings).shares_frozen


def test_scales_multiply_the_weights_of_rewards_alone() -> None:
    config = load_config(QUICKSTART, ["rewards.hps.weight=2", "rewards.oracle.weight=0"])
    lowered = config.reweighted({"hps": 0.25, "oracle": 0.5})
    weights = {name: reward.weight for name, reward in lowered.rewards.items()}
    own = config.rewards["clip"].weight
    assert weights == {"hps": 0.5, "clip": own, "oracle": 0}
    assert config.rewards["hps"].weight == 2
    assert lowered.trained_rewards.keys() == config.trained_rewards.keys() == {"hps", "clip"}
    assert config.reweighted({}) == config
    dumped = config.model_dump(exclude={"rewards"})
    assert lowered.model_dump(exclude={"rewards"}) == dumped


def test_a_value_of_several_kinds_is_one_line_with_its_key() -> None:
    for override, line in (
        ("model.share_frozen=maybe", "Input should be 'auto', or a valid boolean (got 'maybe')"),
        ("rollout.batch_size=many", "Input should be a valid integer, or 'auto' (got 'many')"),
        ("prompts.key=[1]", "Input should be a valid string, or a valid integer (got [1])"),
    ):
        assert error_of(override).splitlines()[1:] == [f"  {override.partition('=')[0]}: {line}"]


def test_a_guard_that_could_not_lower_anything_is_refused() -> None:
    guard = "evaluation.guards={oracle: {max_drop: 0.1, then: lower_weight}}"
    one = (guard, "rewards.clip.weight=0", "advantage.combine=rewards")
    assert "hps is the one trained reward and advantage.combine is rewards" in error_of(*one)
    for fine in (one[:2], (guard, one[2]), (*one, "advantage.normalisation=mean_only")):
        assert quickstart(*fine).evaluation.guards


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "model: frozen_dtype is float8 and lora is not set: weights that are trained"),
        (
            ("model.trained_modules=[attn.to_q]",),
            "model: frozen_dtype is float8 and lora is not set: weights that are trained",
        ),
        (
            ("model.lora.rank=2", "learner.zero_stage=3"),
            "model.frozen_dtype is float8 and learner.zero_stage is 3, which splits weights",
        ),
    ],
)
def test_weights_that_are_trained_or_split_are_not_kept_in_8_bits(
    overrides: tuple[str, ...], said: str
) -> None:
    assert said in error_of("model.frozen_dtype=float8", *overrides)
    assert quickstart("model.lora.rank=2", "model.frozen_dtype=float8").model.lora is not None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "attention is flash3, for compiled code on Hopper cards, and compile is none with"),
        (
            ("rollout.gpus_per_worker=1", "rollout.compile=false"),
            "and compile is false with gpus_per_worker 1: leave attention out",
        ),
        (
            ("rollout.gpus_per_worker=1",),
            "rollout.attention is flash3 and model.dtype is float32: it has code for bfloat16",
        ),
    ],
)
def test_flash3_is_for_compiled_bfloat16_on_cards(overrides: tuple[str, ...], said: str) -> None:
    asked = "rollout.attention=flash3"
    assert said in error_of(asked, *overrides)
    fine = quickstart(asked, "rollout.gpus_per_worker=0.5", "model.dtype=bfloat16")
    assert fine.rollout.attention == "flash3"
