"""Style and scripts of the pages of `ctpo watch`, as files: its pages hold no script."""

from __future__ import annotations

from functools import cache

from ctpo_megatron.report.rendering import rendered

_CSS, _JS = "text/css", "text/javascript"


@cache
def asset(name: str) -> tuple[bytes, str] | None:
    """Content and media type of a file; None where there is none of this name."""
    match name:
        case "style.css":
            return rendered("watch.css.jinja").encode(), _CSS
        case "page.js":
            return rendered("watch.js.jinja").encode(), _JS
    return None
