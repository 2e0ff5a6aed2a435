"""Every command that README and docs show: the real parsers take it, its recipe and settings are
there, and it runs in a test, or the page says that it needs a card."""

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from g2rpo_ray import cli
from g2rpo_ray.config import Config, load_config
from tests.scripts.loading import script_options

PROJECT = Path(__file__).parents[1]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"^(?:.*(?:do|--) )?\s*((?:g2rpo [a-z]|make [a-z]|python (?:-m g2rpo_ray|scripts/))[^;]*)"
)
MARK = "needs a card"
"""In a comment on the command's line, or above it in its block."""
ON_A_CARD = ("runs/mine", "runs/klein", "/shared/runs/mine")
"""Runs of recipes that compute on cards."""
PLACEHOLDERS = {"RUN_DIR", "CONFIG", "PICTURES", "FILE", "DIR", "run"}
RUN_BY = {
    "train": "integration/test_train.py",
    "evaluate": "integration/test_evaluation.py",
    "sample": "run/test_export.py",
    "export": "run/test_export.py",
    "score": "evaluation/test_score.py",
    "download": "commands/test_download.py",
    "doctor": "doctor/test_checks.py",
    "demo": "evaluation/test_demo.py",
    "build_tiny_scorers": "tiny_world/test_scorers.py",
    "build_tiny_world": "tiny_world/test_build.py",
    "compare_algorithms": "scripts/test_compare_algorithms.py",
    "granularity_bias": "scripts/test_granularity_bias.py",
    "judgement": "scripts/test_compare_runs.py",
    "rehearse": "scripts/test_rehearse.py",
    "soak": "scripts/test_soak.py",
    "g2rpo_ray.rewards.contract": "rewards/test_contract.py",
    "g2rpo_ray.rewards.scorers.isolated": "rewards/test_hpsv2.py",
}
"""What needs no card, and the test that runs it on the tiny world; ``plan`` runs here, and CI is
made of ``make``'s targets."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    words: tuple[str, ...]
    """From ``g2rpo``, ``make`` or ``python`` on; variables are filled in."""
    marked: bool

    @property
    def name(self) -> str:
        """``train`` of ``g2rpo train``, ``soak`` of ``python scripts/soak.py``, a module's name."""
        place = 2 if self.words[1] == "-m" else 1
        return self.words[place].removeprefix("scripts/").removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def blocks(text: str) -> Iterator[list[str]]:
    """Lines of fenced shell blocks and of indented ones, continued lines joined."""
    fenced = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in fenced + re.findall(r"(?:^    .*\n)+", rest, re.MULTILINE):
        yield re.sub(r"\\\n\s*|\n\s+(?=\[)", " ", block).splitlines()


def commands() -> Iterator[Command]:
    for page in PAGES:
        for lines in blocks(page.read_text(encoding="utf-8")):
            variables: dict[str, str] = {}
            marked = False
            for line in lines:
                marked |= MARK in line.partition("#")[2]
                variables |= re.findall(r"^\s*(\w+)=([\w./]+)$", line)
                variables |= re.findall(r"for (\w+) in (\w+)", line)
                if found := COMMAND.search(line):
                    text = found[1]
                    for name, value in variables.items():
                        text = text.replace(f"${name}", value)
                    words = shlex.split(text, comments=True)
                    yield Command(page.name, tuple(_first_of(words)), marked)


def _first_of(words: list[str]) -> Iterator[str]:
    """Of a synopsis, ``[--format a|b | --merged]``, the first choice."""
    dropped = False
    for word in words:
        dropped |= word == "|"
        if dropped:
            dropped = not word.endswith("]")
            continue
        # [--option VALUE], not key=[1,2]
        optional = word.startswith("[") or (word.endswith("]") and "[" not in word)
        word = word.strip("[]").split("|")[0] if optional or "|" in word else word
        yield "1" if word == "N" else word


COMMANDS = list(commands())


def parsed(command: Command) -> argparse.Namespace | None:
    """What the real parser makes of it; ``make`` has none."""
    words = list(command.words)
    if words[0] == "g2rpo":
        return cli._parse(words[1:])
    if words[0] == "make":
        assert re.search(f"^{words[1]}:", (PROJECT / "Makefile").read_text(), re.MULTILINE)
        return None
    if words[1] == "-m":
        # These two take two words, and have no options.
        assert len(words) == 5
        assert (PROJECT / f"{words[2].replace('.', '/')}.py").is_file()
        return None
    return script_options(command.name, command.words[2:])


def settings_of(options: argparse.Namespace) -> Config | None:
    """Of the recipe that it names, with its overrides; None where a run or a placeholder stands."""
    overrides = getattr(options, "overrides", [])
    config = getattr(options, "config", None)
    is_recipe = str(config).startswith("configs/")
    if is_recipe or overrides:
        # A run's settings are the quickstart's, where the page says no more.
        return load_config(
            PROJECT / (str(config) if is_recipe else "configs/quickstart.yaml"), overrides
        )
    return None


def needs_card(command: Command, options: argparse.Namespace | None) -> bool:
    """By its settings: those of its recipe, or of the run that it names."""
    if command.words[0] != "g2rpo":
        return (
            command.name == "bench_costs"
            or (command.name in ("rehearse", "bench_card") and "--tiny" not in command.words)
            or getattr(options, "cards", 0) not in (0, [0])
        )
    if command.name in ("plan", "download", "score") or getattr(options, "dry_run", False):
        return False
    if command.name == "embed":
        assert options is not None
        return options.gpus_per_worker > 0
    if any(word.startswith(ON_A_CARD) for word in command.words[2:3]):
        return command.name != "export"
    config = settings_of(options) if options is not None else None
    return config is not None and config.rollout.gpus_per_worker > 0


IN_LINES = {
    " ".join(span.split()): page.name
    for page in (*PAGES, PROJECT / "CONTRIBUTING.md")
    for block in re.split("^```", page.read_text(), flags=re.MULTILINE)[::2]
    for span in re.findall(r"`python scripts/(\w+\.py\s[^`]+)`", block)
}
"""Scripts' commands in a text's lines -> its page."""


@pytest.mark.parametrize("span", IN_LINES)
def test_a_command_in_a_line_has_all_that_its_script_wants(span: str) -> None:
    script, *words = shlex.split(re.sub(r"\b[A-Z]\b", "1", span))
    assert script_options(script.removesuffix(".py"), words), IN_LINES[span]


def test_the_pages_show_the_commands_of_every_kind() -> None:
    names = {command.name for command in COMMANDS if command.words[0] == "g2rpo"}
    assert names == {module.__name__.rpartition(".")[2] for module in cli.COMMANDS}
    assert len(COMMANDS) > 60


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_the_docs_is_what_the_code_takes(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    options = parsed(command)
    if command.words[0] == "g2rpo" and options is not None and command.name != "score":
        settings_of(options)
    if needs_card(command, options):
        assert command.marked, f"say '# {MARK}' above it, in its block"
    elif command.words[0] != "make" and command.name not in ("plan", "embed"):
        test = PROJECT / "tests" / RUN_BY[command.name]
        assert command.name.rpartition(".")[2] in test.read_text()


PLANS = [c for c in COMMANDS if c.name == "plan" and not PLACEHOLDERS & {*c.words}]


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANS, ids=str)
def test_the_plans_of_the_docs_are_made(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PROJECT)
    assert cli.main(command.words[1:]) in (0, None)
    assert "GiB" in capsys.readouterr().out
