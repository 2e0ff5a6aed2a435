"""Pages from templates: text in them is escaped, whatever it holds."""

from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from g2rpo_ray.common.formatting import format_change, format_score, format_seconds

PACKAGE = "g2rpo_ray.tracking.report"
"""Its ``templates`` hold what all pages share: ``page.html`` and ``style.css``."""
PIXELATED_BELOW = 200
"""Pictures smaller than this are enlarged with sharp pixels instead of a blur."""


def render(template: str, package: str = PACKAGE, /, **values: object) -> Markup:
    """Fill in a template.

    Args:
        template: file in the folder ``templates`` of the package, or of this one.
        values: what the template names; a name that is missing is an error.
    """
    return Markup(_environment(package).get_template(template).render(values))


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(PACKAGE)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"score": format_score, "seconds": format_seconds}
    environment.globals |= {"change": format_change, "way": way}
    return environment


def way(before: float | None, after: float | None) -> str:
    """Which way a score went: the name of its style."""
    if before is None or after is None or before == after:
        return "same"
    return "up" if after > before else "down"
