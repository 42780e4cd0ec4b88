"""Pages from the templates of `templates/`; text in their values is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.printable import printable
from ctpo_megatron.report.theme import DARK, LIGHT

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"


def rendered(template: str, **values: Any) -> str:
    """The page. Raises jinja2.UndefinedError for a value that the template wants and is not given."""
    return _environment().get_template(template).render(colours={"light": LIGHT, "dark": DARK}, **values)


def _shown(value: Any) -> Any:
    """Texts of models and data show what would hide or reorder what stands next to it."""
    return type(value)(printable(value, lines=True)) if isinstance(value, str) else value


@cache
def _environment() -> Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
