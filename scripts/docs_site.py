"""Pages of the documentation site that the code itself says; MkDocs calls this (mkdocs.yml).

Settings come from the sections in ``config``, commands from their ``--help``, the API from the
docstrings of the rooms, and the pages outside docs/ (README, CONTRIBUTING, the table of metrics)
from where they lie: nothing is written twice, so nothing can go stale.
"""

import contextlib
import importlib
import io
import os
import posixpath
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from draw_rooms import room_names
from g2rpo_ray import cli
from g2rpo_ray.config import Config

ROOT = Path(__file__).parents[1]
PACKAGE = "g2rpo_ray"

MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    f"{PACKAGE}/tracking/metrics.md": "reference/metrics.md",
}
"""Pages that lie outside docs/, and where they stand on the site."""
UNITS = {
    "_s": "s",
    "_px": "pixels",
    "threads": "threads",
    "_per_worker": "for one worker",
    "_per_rank": "for one rank",
}
"""End of a setting's name -> its unit."""
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "none"}
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)]*)?(\))")
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The API's pages stand in the navigation, a room after the other."""
    (inside,) = (part["Inside"] for part in config.nav or [] if "Inside" in part)
    inside.append({"API": [{room: f"api/{room}.md"} for room in room_names()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    pages = {place: (ROOT / source).read_text() for source, place in MOVED.items()}
    pages |= {"reference/settings.md": settings_page(), "reference/commands.md": commands_page()}
    pages |= {f"api/{room}.md": room_page(room) for room in room_names()}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links between files of the repository become links between pages of the site."""
    place = page.file.src_uri
    source = next((s for s, moved in MOVED.items() if moved == place), f"docs/{place}")

    def follow(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = MOVED.get(wanted, wanted.removeprefix("docs/"))
        return (
            before + posixpath.relpath(on_site, posixpath.dirname(place)) + (anchor or "") + after
        )

    return LINK.sub(follow, markdown)


def room_page(room: str) -> str:
    """The API of a room: a section for each of its modules."""
    module = importlib.import_module(f"{PACKAGE}.{room}")
    folder = Path(str(module.__file__)).parent
    names = [f"{PACKAGE}.{room}"]
    if Path(str(module.__file__)).name == "__init__.py":
        names += [
            ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for path in sorted(folder.rglob("*.py"))
            if path.name != "__init__.py"
        ]
    return f"# {room}\n\n" + "\n".join(f"::: {name}\n" for name in names)


def commands_page() -> str:
    """What ``g2rpo COMMAND --help`` prints, for each command."""
    lines = ["# Commands", "", "What `g2rpo COMMAND --help` prints.", ""]
    for module in cli.COMMANDS:
        name = module.__name__.rpartition(".")[2]
        text = io.StringIO()
        with (
            patch.dict(os.environ, {"COLUMNS": "100"}),
            contextlib.redirect_stdout(text),
            contextlib.suppress(SystemExit),
        ):
            cli.main([name, "--help"])
        lines += [f"## g2rpo {name}", "", "```text", text.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)


def settings_page() -> str:
    """Every setting of a run: type, unit, default, bounds, meaning."""
    intro = (
        "Every setting of a run, by section. A YAML file holds them; `section.key=value` on the "
    )
    intro += "command line replaces one. Unknown keys and values out of bounds are errors."
    return "\n".join(["# Settings", "", intro, "", *_section("", Config)])


def _section(path: str, section: type[BaseModel]) -> list[str]:
    inner, rows = [], []
    for name, field in section.model_fields.items():
        types = [t for t in _types(field.annotation) if isinstance(t, type)]
        sections = [t for t in types if issubclass(t, BaseModel)]
        key = f"{path}{name}"
        if sections:
            by_name = "dict" in str(field.annotation)
            inner += _section(f"{key}.<name>." if by_name else f"{key}.", sections[0])
        else:
            rows.append(_row(name, field))
    head = ["| setting | default | type, unit, bounds | meaning |", "|---|---|---|---|"]
    title = f"## `{path.rstrip('.')}`" if path else "## The run itself"
    return [title, "", *head, *rows, "", *inner]


def _row(name: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    default = "required" if field.is_required() else f"`{_shown(value)}`"
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    kind = ", ".join(part for part in (_type_name(field.annotation), unit, _bounds(field)) if part)
    meaning = " ".join((field.description or "").split()).replace("``", "`")
    cells = [f"`{name}`", default, kind, meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value) or "''"


def _bounds(field: FieldInfo) -> str:
    rules = [*field.metadata, *(rule for t in _types(field.annotation) for rule in _rules(t))]
    found = [
        f"{sign} {getattr(rule, name):.12g}"
        for rule in rules
        for name, sign in BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join(found)


def _rules(annotation: Any) -> list[Any]:
    found = getattr(annotation, "__metadata__", ())
    return [rule for field in found for rule in getattr(field, "metadata", [])]


def _type_name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is Annotated:
        return _type_name(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(_type_name(one) for one in inner)
    if origin is not None:
        return f"{origin.__name__} of {', '.join(_type_name(one) for one in inner)}"
    return NAMES.get(annotation) or annotation.__name__


def _types(annotation: Any) -> list[Any]:
    return [annotation, *(inner for arg in get_args(annotation) for inner in _types(arg))]
