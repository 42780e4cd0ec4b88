"""Turns a matplotlib figure into SVG for inlining, with the colours and font of the surrounding page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from ctpo_megatron.tracking.panels import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def to_svg(figure: Figure, name: str) -> str:
    """The `<svg>` element of a figure drawn in the colours of `LIGHT`; `name` makes its ids unique and stable."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    source = buffer.getvalue()
    source = source[source.index("<svg") :]
    source = re.sub(r' xmlns(:\w+)?="[^"]*"', "", source)
    # Twice, for width and height: the page sets the size, and the view box stays.
    for _ in ("width", "height"):
        source = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", source, count=1)
    source = source.replace("xlink:href", "href")
    source = re.sub(r"(\d\.\d\d)\d+", r"\1", source)
    for variable, colour in LIGHT.items():
        source = source.replace(colour, f"var(--{variable})")
    return re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", source)
