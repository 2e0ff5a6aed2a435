"""What README and docs tell users to type is what the code takes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from g2rpo_ray import cli
from g2rpo_ray.config import load_config
from g2rpo_ray.models.catalogue import CATALOGUE
from g2rpo_ray.prompts.dataset import check_apart
from g2rpo_ray.prompts.reading import read_prompts
from g2rpo_ray.rewards.registry import SCORERS

PROJECT = Path(__file__).parents[1]
DOCS = PROJECT / "docs"


def test_the_readme_leads_from_the_prompts_to_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(PROJECT)
    text = (PROJECT / "README.md").read_text()
    block = text[text.index("## On FLUX.1-dev") :].split("```")[1]
    commands = [
        shlex.split(line, comments=True)
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("g2rpo ")
    ]
    used = {c[1]: cli._parse(c[1:]) for c in commands if "--dry-run" not in c}
    names = {"download", "embed", "plan", "train", "evaluate", "score", "sample", "demo"}
    assert used.keys() == names
    started, resumed = (c for c in commands if c[1] == "train" and "--dry-run" not in c)
    options = cli._parse(started[1:])
    config = load_config(options.config, options.overrides)
    # Each step takes what the step before it made.
    given = load_config(options.config).prompts
    train, heldout = (cli._parse(command[1:]) for command in commands if command[1] == "embed")
    assert (train.source, heldout.source) == (given.train, given.heldout)
    assert (config.prompts.train, config.prompts.heldout) == (str(train.out), str(heldout.out))
    assert train.limit == config.iterations * config.sampling.prompts_per_iteration
    assert heldout.limit == config.evaluation.prompts
    # A resumed run goes on with its own settings, not with the recipe's.
    assert resumed[2:] == [f"{config.run_dir}/config.yaml", "--resume", "auto"]
    for command in ("evaluate", "sample", "demo"):
        assert str(used[command].run_dir) == config.run_dir


def test_the_recipes_prompts_are_made_as_the_docs_say(tmp_path: Path) -> None:
    (script,) = re.findall(r"<<'EOF'\n(.*?)\nEOF", (DOCS / "data.md").read_text(), re.DOTALL)
    folder = tmp_path / "data" / "HPDv2"
    folder.mkdir(parents=True)
    texts = {
        "train": ["a cat", "a  dog\nin two lines", "a cat", "held out", " ", "红色圆圈"],
        "test": ["held out", "a fish"],
    }
    for split, prompts in texts.items():
        entries = [{"prompt": text, "file_path": ["1.jpg", "2.jpg"]} for text in prompts]
        (folder / f"{split}.json").write_text(json.dumps(entries))
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    recipe = load_config(PROJECT / "configs" / "flux_g2rpo_hps.yaml").prompts
    train, heldout = (
        read_prompts(tmp_path / path, recipe.max_characters)
        for path in (recipe.train, recipe.heldout)
    )
    assert train == ["a cat", "a dog in two lines", "红色圆圈"]
    assert heldout == ["held out", "a fish"]
    check_apart(train, heldout)


def test_every_scorer_and_every_model_stands_in_the_docs() -> None:
    rewards = (DOCS / "rewards.md").read_text()
    data = "".join((DOCS / name).read_text() for name in ("data.md", "models.md"))
    assert [kind for kind in SCORERS if f"| `{kind}` |" not in rewards] == []
    assert [name for name in CATALOGUE if f"`{name}`" not in data] == []
    # And none that is not known.
    assert (
        set(re.findall(r"(?<!g2rpo_ray/)(?<!tests/)models/([\w.-]+)", rewards + data))
        <= CATALOGUE.keys()
    )


FILES = [
    str(path)
    for root in ("g2rpo_ray", "cluster", "scripts", "tests")
    for path in (PROJECT / root).rglob("*.*")
]
FOREIGN = {"stage3.py", "stage_1_and_2.py"}
"""Files of DeepSpeed's."""
PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SOURCES = [*PAGES, *sorted((PROJECT / "g2rpo_ray").rglob("*.py"))]


def test_every_file_of_code_that_a_text_names_is_there() -> None:
    gone = []
    for source in SOURCES:
        text = source.read_text()
        named = set(re.findall(r"`([\w/]+\.(?:py|sh|sbatch))\b", text))
        named |= {
            module.replace(".", "/") + ".py"
            for module in re.findall(r"python -m (g2rpo_ray[\w.]*\w)", text)
        }
        gone += [
            f"{source.name}: {name}"
            for name in sorted(named - FOREIGN)
            if not any(file.endswith(f"/{name}") for file in FILES)
        ]
    assert "\n".join(gone) == ""


def test_the_command_for_a_card_has_every_test_that_needs_one() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    (named,) = re.findall(r"`pytest -m gpu ([^`]+)`", text)
    paths = [PROJECT / path for path in named.split()]
    needy = [f for f in PROJECT.glob("tests/**/*.py") if "pytest.mark.gpu" in f.read_text()]
    needy.remove(Path(__file__))
    assert len(needy) > 5
    assert [f for f in needy if not any(f.is_relative_to(path) for path in paths)] == []
