"""Prompts that a reward cannot judge are named before a run."""

import sys
from pathlib import Path

import pytest

from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.config import load_config
from g2rpo_ray.evaluation.evaluate import evaluate
from g2rpo_ray.models.catalogue import reward_problems, targets_of
from g2rpo_ray.rewards.prompts import check_prompts
from g2rpo_ray.rewards.scorer import ScorerError, wanted_of
from g2rpo_ray.rewards.section import RewardSection
from g2rpo_ray.training.session import open_session
from tests.tiny import QUICKSTART

OCR = RewardSection(kind="ocr")
GENEVAL = RewardSection(kind="composition", options={"detector": "a/b", "clip": "ViT-L-14"})


@pytest.mark.parametrize(
    ("reward", "good", "bad", "cause"),
    [
        (OCR, 'a sign "A"', "a fox", "'a fox': no text in double quotes"),
        (OCR, 'a sign "A"', 'a sign "A', "the quote that opens at character 8"),
        (GENEVAL, PromptText("x", {"include": [{"class": "cat"}]}), "a cat", "neither include"),
    ],
)
def test_some_prompts_that_a_reward_cannot_judge(
    reward: RewardSection, good: str, bad: str, cause: str
) -> None:
    check_prompts({"it": reward}, [good, good], "prompts.train", stop=True)
    with pytest.raises(ScorerError) as caught:
        check_prompts({"it": reward}, [good, bad, good], "prompts.train", stop=True)
    message = str(caught.value)
    assert message.startswith("rewards.it cannot judge 1 of 3 prompts of prompts.train, such as ")
    assert cause in message
    # Where a run goes on without a score, one prompt is enough.
    check_prompts({"it": reward}, [good, bad], "prompts.train", stop=False)
    lenient = reward.model_copy(update={"required": False})
    check_prompts({"it": lenient}, [good, bad], "prompts.train", stop=True)
    with pytest.raises(ScorerError, match=r"cannot judge 1 of 1 prompts of prompts\.heldout"):
        check_prompts({"it": lenient}, [bad], "prompts.heldout", stop=False)


def test_other_scorers_judge_any_prompt() -> None:
    check_prompts(load_config(QUICKSTART).rewards, ["", "a fox"], "prompts.train", stop=True)


def test_each_prompt_is_read_once_and_all_bad_ones_are_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = []

    def length(prompt: str) -> int:
        read.append(prompt)
        if not prompt:
            raise ScorerError("empty")
        return len(prompt)

    assert wanted_of(["ab", "", "ab", ""], length) == [2, None, 2, None]
    assert (read, len(caplog.records)) == (["ab", ""], 1)
    with pytest.raises(ScorerError, match="empty"):
        wanted_of(["", ""], length)


def test_a_missing_package_counts_where_the_replica_has_no_environment_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    overrides = ["rewards.sign.kind=ocr", "rewards.sign.weight=0"]
    (problem,) = reward_problems(load_config(QUICKSTART, overrides))
    assert problem.startswith("rewards.sign: kind ocr needs the packages rapidocr and onnxruntime")
    elsewhere = [*overrides, 'rewards.sign.runtime_env={"pip": ["rapidocr", "onnxruntime"]}']
    assert list(reward_problems(load_config(QUICKSTART, elsewhere))) == []


@pytest.mark.parametrize(
    ("kind", "options", "repos"),
    [
        (
            "composition",
            "{detector: models/owlv2-base-patch16-ensemble, "
            "clip: 'local-dir:models/vit_large_patch14_clip_224.openai'}",
            ["google/owlv2-base-patch16-ensemble", "timm/vit_large_patch14_clip_224.openai"],
        ),
        (
            "hpsv3",
            "{checkpoint: models/HPSv3.safetensors, base: models/Qwen2-VL-7B-Instruct}",
            ["MizzenAI/HPSv3", "Qwen/Qwen2-VL-7B-Instruct"],
        ),
    ],
)
def test_download_knows_the_files_of(kind: str, options: str, repos: list[str]) -> None:
    config = load_config(QUICKSTART, [f"rewards.it.kind={kind}", f"rewards.it.options={options}"])
    assert [target.source.repo for target in targets_of(config) if target.source] == repos


def test_a_run_and_an_evaluation_look_at_their_prompts(tmp_path: Path) -> None:
    options = "{detector: no/such/folder, clip: ViT-L-14}"
    overrides = [f"run_dir={tmp_path / 'run'}", "rewards.it.kind=composition",
                 f"rewards.it.options={options}"]  # fmt: skip
    heldout = r"rewards\.it cannot judge \d+ of \d+ prompts of prompts\.heldout"
    for weight, cause in ((0, heldout), (1, heldout.replace("heldout", "train"))):
        config = load_config(QUICKSTART, [*overrides, f"rewards.it.weight={weight}"])
        with pytest.raises(ScorerError, match=cause), open_session(config, "none"):
            pass
        assert not (tmp_path / "run").exists()
    with pytest.raises(ScorerError, match=heldout):
        evaluate(config, checkpoints=["base"], steps=[2], folder=tmp_path / "evaluation")
