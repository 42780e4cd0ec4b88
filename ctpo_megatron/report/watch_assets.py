"""Style and scripts of the pages of `ctpo watch`, as files; the report has its own inside, which are known by hash."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from functools import cache

from ctpo_megatron.report.page_data import bundle
from ctpo_megatron.report.rendering import rendered

_CSS, _JS = "text/css", "text/javascript"
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@cache
def asset(name: str) -> tuple[bytes, str] | None:
    """Content and media type of a file; None where there is none of this name."""
    match name:
        case "style.css":
            return rendered("watch.css.jinja").encode(), _CSS
        case "page.js":
            return rendered("report.js.jinja").encode(), _JS
        case "vega.js":
            return gzip.decompress(base64.b64decode(bundle())), _JS
    return None


def known_scripts(page: str) -> list[str]:
    """Hashes of our scripts in a report, as a Content-Security-Policy has them; of no other script that it may hold."""
    own = rendered("report.js.jinja").strip()
    texts = [match[1].encode() for match in _SCRIPT.finditer(page) if match[1].strip() == own]
    library = asset("vega.js")
    return [_hash(text) for text in [*texts, *([library[0]] if library else [])]]


def _hash(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode('ascii')}'"
