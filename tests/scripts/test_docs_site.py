"""The documentation site: what the code says is on it, and a dead link fails the build."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import docs_site
from g2rpo_ray import cli
from g2rpo_ray.common.section import Section
from g2rpo_ray.config import Config

ROOT = Path(__file__).parents[2]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", f"-f{config}", f"-d{site}"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_setting_has_its_row_with_default_and_bounds() -> None:
    page = docs_site.settings_page()
    annotations = [Config, *(field.annotation for field in Config.model_fields.values())]
    sections = [one for one in annotations if isinstance(one, type) and issubclass(one, Section)]
    names = {name for section in sections for name in section.model_fields}
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    inner = {name for name in names if f"## `{name}`" in page or f"## `{name}.<name>`" in page}
    assert names - rows - inner == {"lora", "guards"}
    assert "## `evaluation.guards.<name>`" in page
    assert "| `timeout_s` | `1800.0` | number, s, > 0 |" in page
    assert "| `batch_size` | `8` | integer or `auto`, ≥ 1 |" in page
    # Each has words.
    assert not re.findall(r"^\| `\w+` \|.*\|\s*\|$", page, re.MULTILINE)


def test_every_command_shows_its_help() -> None:
    page = docs_site.commands_page()
    for module in cli.COMMANDS:
        name = module.__name__.rpartition(".")[2]
        assert f"usage: g2rpo {name}" in page


@pytest.mark.slow
def test_the_docs_build_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "integrate_advantages" in (tmp_path / "api" / "maths.html").read_text()
    links = (tmp_path / "index.html").read_text()
    assert 'href="one_card.html"' in links
    assert 'href="reference/metrics.html"' in links


@pytest.mark.parametrize(("target", "code"), [("gone.md", 1), ("kept.md", 0), ("kept.md#no", 1)])
def test_a_dead_link_fails_the_build(target: str, code: int, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "kept.md").write_text(f"[a link]({target})")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    only = {"docs_dir": str(docs), "plugins": [], "hooks": [], "nav": [{"Page": "kept.md"}]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config | only))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == code, done.stderr
    assert ("WARNING" in done.stderr) is bool(code)
