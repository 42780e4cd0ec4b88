"""Pages in the style of the report: one file that opens offline, light or dark, without requests to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import write_text

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write a page from a template of `templates/` and its values; text in `values` is escaped. Returns `path`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return write_text(path, environment.get_template(template).render(**values))
