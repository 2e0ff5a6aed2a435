"""Settings that cannot be together are named, in a section or across several."""

import pytest

from tests.config.quick import error_of, quickstart


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
            ["checkpoint.best=hps", "evaluation.every=5", "checkpoint.every=18"],
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
            ["rollout.speed=fast", "rollout.fp8=true"],
            ["rollout: speed is fast, which sets fp8 to false, and fp8 is true", "speed: null"],
        ),
        (
            ["rollout.thin_completions=true"],
            ["rollout", "thin_completions is gone", "set completion_stride"],
        ),
        (
            ["rollout.speed=balanced", "rollout.completion_stride=3"],
            ["rollout: speed is balanced, which sets completion_stride to 2, and", "is 3"],
        ),
        (
            ["rollout.speed=exact", "rollout.completion_stride=2"],
            ["rollout: speed is exact", "completion_stride to 1, and completion_stride is 2"],
        ),
        (
            ["algorithm=flow_grpo", "rollout.speed=balanced"],
            [
                "rollout.speed is balanced, which sets completion_stride to 2",
                "algorithm is flow_grpo",
            ],
        ),
        (
            ["g2rpo.granularities=[2,3]", "rollout.speed=balanced"],
            [
                "rollout.speed is balanced, which sets completion_stride to 2",
                "granularities is [2, 3]",
                "a stride of 3 or more",
            ],
        ),
        (
            ["g2rpo.granularities=[3]", "rollout.completion_stride=2"],
            ["rollout.completion_stride is 2", "granularities is [3]", "a stride of 4 or more"],
        ),
        (
            ["algorithm=mix_grpo", "rollout.completion_stride=2"],
            ["rollout.completion_stride is 2", "algorithm is mix_grpo"],
        ),
        (
            ["rollout.completion_stride=5"],
            ["completion_stride is 5", "sampling.steps=6", "steps 1 to 5", "stride of 1 to 4"],
        ),
        (
            ["g2rpo.sde_steps=[3,2]", "rollout.speed=fast"],
            ["rollout.speed is fast", "completion has steps 3 to 5", "a stride of 1 to 2"],
        ),
        (
            ["algorithm=e_grpo", "e_grpo.first=5", "rollout.completion_stride=100"],
            ["rollout.completion_stride is 100", "a stride of 1 to 4"],
        ),
        (
            ["g2rpo.sde_steps=[4]", "rollout.speed=balanced"],
            ["which sets completion_stride to 2", "steps 5 to 5. Use 1, or more steps"],
        ),
        (
            ["rollout.fp8=true", "rollout.gpus_per_worker=1", "model.dtype=float32"],
            ["rollout.fp8 is true", "model.dtype is float32", "bfloat16"],
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
        ["algorithm=e_grpo", "e_grpo.first=5", "rollout.completion_stride=2"],
        # Of each granularity, not only of 1, the walk between is estimated.
        ["g2rpo.granularities=[2]", "rollout.completion_stride=3"],
        # The last stride that says something: the longest walk's first evaluation and its last.
        ["rollout.completion_stride=4"],
        ["algorithm=e_grpo", "e_grpo.first=5", "rollout.completion_stride=4"],
        ["g2rpo.sde_steps=[3]", "sampling.steps=7", "rollout.completion_stride=2"],
        ["g2rpo.granularities=[1,3]", "rollout.speed=balanced"],
        # A window over the whole schedule has one place, whatever the stride.
        ["algorithm=mix_grpo", "mix_grpo.window=5"],
        ["algorithm=mix_grpo", "mix_grpo.window=3", "mix_grpo.stride=2"],
    ],
)
def test_what_only_looks_like_an_impossible_combination(overrides: list[str]) -> None:
    quickstart(*overrides)
