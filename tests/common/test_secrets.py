"""Secrets in settings: refused by name and shape, never shown; ordinary settings pass."""

import json
import logging
import sys
from pathlib import Path

import pytest
import yaml

from g2rpo_ray import cli
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.logs import JsonFormatter
from g2rpo_ray.common.secrets import publishable, redacted, secrets_in
from g2rpo_ray.common.section import ConfigError
from g2rpo_ray.config import load_config

ROOT = Path(__file__).parents[2]
HTTP = ["rewards.mine.kind=http", "rewards.mine.options.url=http://judge:8000/v1"]
CUSTOM = ["rewards.mine.kind=python", "rewards.mine.options.target=a.b:C"]
SECRET = "hunter2hunter2"
HF = "hf_" + "aB3" * 9


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_no_recipe_holds_what_looks_like_a_secret(path: Path) -> None:
    assert list(secrets_in(yaml.safe_load(path.read_text()))) == []
    load_config(path)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([f"rewards.mine.options.url=https://me:{SECRET}@judge/v1"], "rewards.mine.options.url"),
        ([f"rewards.mine.options.url=https://{SECRET}@judge/v1"], "rewards.mine.options.url"),
        ([f"rewards.mine.options.url=https://judge/v1?key={SECRET}"], "rewards.mine.options.url"),
        ([f"rewards.mine.options.url=https://judge/?a=1&X-Amz-Signature={SECRET}"], "options.url"),
        ([f"rewards.mine.options.url=https://judge/?access_token={SECRET}"], "options.url"),
        ([f"rewards.mine.options.api_key_env={SECRET}-1"], "rewards.mine.options.api_key_env"),
        ([*CUSTOM, f"rewards.mine.options.options.api_key={SECRET}"], "options.options.api_key"),
        ([*CUSTOM, f"rewards.mine.options.options.a.db-password={SECRET}"], "a.db-password"),
        ([*CUSTOM, f"rewards.mine.options.options.tokens=[{SECRET}]"], "options.options.tokens.0"),
        ([*CUSTOM, f"rewards.mine.options.options.seen={HF}"], "options.options.seen"),
        ([*CUSTOM, "rewards.mine.options.options.x=[sk-proj-abcdefgh12345678]"], "options.x.0"),
        ([f"rewards.mine.runtime_env.pip=[a, '--index-url https://u:{SECRET}@h/simple']"], "pip.1"),
        ([f"rewards.mine.runtime_env.env_vars.PIP_INDEX_URL=https://{SECRET}@h"], "PIP_INDEX_URL"),
        ([f"rewards.mine.runtime_env.working_dir=https://{SECRET}@h/x.zip"], "env.working_dir"),
        ([f"run_dir=s3://a:{SECRET}@bucket"], "run_dir"),
        ([f"model.hub_token={SECRET}"], "model.hub_token"),
        ([f"tracking.wandb_project={HF}"], "tracking.wandb_project"),
    ],
)
def test_a_secret_is_refused_by_its_key_and_not_repeated(
    overrides: list[str], key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = str(ROOT / "configs" / "quickstart.yaml")
    run = [f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["train", config, "--dry-run", *run, *HTTP, *overrides]) == 2
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert key in text
    assert "environment variable" in text
    assert all(secret not in text for secret in (SECRET, HF, "12345678"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "override",
    [
        "rewards.mine.options.url=https://${JUDGE_USER}:${JUDGE_PASSWORD}@judge/v1?key=${JUDGE_KEY}",
        "rewards.mine.options.api_key_env=JUDGE_KEY",
        "rewards.mine.runtime_env.pip=['git+ssh://git@host/a/b.git', 'https://${USER}@h/a.whl']",
        "rewards.mine.runtime_env.env_vars={TOKENIZERS_PARALLELISM: 'false', PIP_INDEX_URL: 'https://host/simple'}",
        "rewards.mine.label_selector={ray.io/accelerator-type: H100}",
        "prompts.key=caption",
        "run_dir=/models/task-force-of-a-very-long-name-2/desk-lamp",
        "sampling.negative_prompt=a bearer of good news, basic understanding, key = lost",
    ],
)
def test_what_only_looks_like_a_secret_passes(override: str) -> None:
    load_config(ROOT / "configs" / "quickstart.yaml", [*HTTP, override])


def test_options_with_a_judges_numbers_and_tokenizers_pass() -> None:
    options = {
        "max_tokens": 512,
        "tokenizer": "/models/t",
        "tokenizer_path": "/a",
        "api_key_env": "A",
    }
    assert list(secrets_in({"options": options})) == []


@pytest.mark.parametrize(
    "override", [f"a.api_key={SECRET}: [", f"a.api_key={SECRET} #2", f"{HF}", f"a=[{HF}"]
)
def test_an_override_that_is_no_yaml_shows_no_secret(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / "configs" / "quickstart.yaml", [override])
    assert SECRET not in str(caught.value)
    assert HF not in str(caught.value)


def test_a_file_that_is_no_yaml_shows_none_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"rewards:\n  api_key: '{SECRET}' oops\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        load_config(path)
    assert SECRET not in str(caught.value)


def test_text_that_is_shown_holds_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"cannot reach https://me:{SECRET}@host/v1?a=1&api_key={SECRET}&b=2 with {HF}"
    clean = "cannot reach https://***@host/v1?a=1&api_key=***&b=2 with ***"
    assert redacted(text) == clean
    two = redacted(f"https://me:p@{SECRET}@host/v1, https://a@b")
    assert two == "https://***@host/v1, https://***@b"

    def fail(_: object) -> None:
        raise InputError(text)

    monkeypatch.setattr("g2rpo_ray.commands.plan.run", fail)
    assert cli.main(["plan", "x"]) == 2
    assert capsys.readouterr().err == f"g2rpo: {clean}\n"
    try:
        fail(None)
    except InputError:
        record = logging.makeLogRecord({"msg": text, "exc_info": sys.exc_info()})
    line = JsonFormatter().format(record)
    assert json.loads(line)["message"] == clean
    assert SECRET not in line


def test_what_is_published_names_no_endpoint_and_no_secret_of_an_older_run() -> None:
    settings = {
        "rewards": {
            "a": {"weight": 1.0, "options": {"url": "https://judge.corp/v1?key=x", "n": 3}}
        },
        "old": {"api_key": SECRET, "url": f"http://me:{SECRET}@h"},
        "steps": [0, 1],
    }
    assert publishable(settings) == {
        "rewards": {"a": {"weight": 1.0, "options": {"url": "***", "n": 3}}},
        "old": {"api_key": "***", "url": "***"},
        "steps": [0, 1],
    }
    assert publishable({"url": "https://judge.corp/v1"}) == {"url": "https://***"}
