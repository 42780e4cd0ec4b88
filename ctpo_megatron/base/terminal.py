"""The console that everything drawn on a terminal goes through: names and texts in it steer nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ctpo_megatron.base.text import printable


class Terminal(Console):
    """rich's console, whose own control codes pass; texts are `printable`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See Console."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text, lines=True)
            yield segment if text == segment.text else Segment(text, segment.style)
