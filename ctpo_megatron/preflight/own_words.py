"""Finds a tool's output in what an assistant says, by the names that its notation has.

Notations are fences, tags, tags in brackets and tokens in bars: ```output (NuminaMath-TIR, ToRA), <interpreter>
(ReTool), [TOOL_RESULTS] (Mistral), <|execute_result|>; and the observation of ReAct. Code may show any of them, so what
is in fences and backticks is left out.
"""

from __future__ import annotations

import re

_SAYS = r"(?:output|result|execution|response|observation|interpreter|stdout|stderr)"
_WHOSE = r"(?:tool|func|code|exec|program|python|sandbox|search|shell|bash|terminal)"
_CALLS = r"(?:code|python|tool|call|func|exec|action|search|command|shell|bash|sql|program|invoke)"
_PART = "[\\w\u2581:.-]{0,40}"
_BAR = "[|\uff5c]"


def _with(*words: str) -> str:
    """Matches a name that holds these words, in their order."""
    return _PART + _PART.join(words) + _PART


_OPEN, _SHUT = "\x02", "\x03"
"""Around the name of a fence, in place of the whole fence."""
_FENCE = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*(?:\n(?:.*?\n)?[ \t]*\1[`~]*(?!\w)|\n.*\Z|\Z)", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"`[^`\n]+`")

_NAMES = rf"{_with(_WHOSE, '(?:output|result|response|observation)')}|{_with('interpreter')}|stdout|stderr"
_ANYWHERE = re.compile(
    rf"{_OPEN}(?:{_NAMES}){_SHUT}|<(?:{_NAMES})(?=[\s>])|\[(?:{_NAMES})\](?!\()|<{_BAR}(?:{_NAMES}|observation){_BAR}>",
    re.IGNORECASE,
)
"""Names that say whose output it is."""
_NAME = _with(_SAYS)
_AFTER_A_CALL = re.compile(
    rf"(?:{_SHUT}|</{_with(_CALLS)}>|\[/{_with(_CALLS)}\]|<{_BAR}{_with(_CALLS)}{_BAR}>)"
    rf"\s*(?:\**(?:\w+ )?{_SAYS}s?:?\**:?\s*)?"
    rf"(?P<notation>{_OPEN}{_NAME}{_SHUT}|<(?P<tag>{_NAME})(?=[\s>])(?=.*?</(?P=tag)>)"
    rf"|\[(?P<bracket>{_NAME})\](?=.*?\[/(?P=bracket)\])|<{_BAR}{_NAME}{_BAR}>)",
    re.IGNORECASE | re.DOTALL,
)
"""A program or a call, perhaps a line such as `Output:`, and a name that says output."""
_REACT = re.compile(r"^Action(?: Input)?:", re.MULTILINE), re.compile(r"^Observation:", re.MULTILINE)


def tool_output(text: str) -> str:
    """The notation of the first tool's output in a text of an assistant; "" without one."""
    outline = _INLINE.sub("", _FENCE.sub(lambda fence: f"{_OPEN}{fence[2]}{_SHUT}", text))
    if found := _ANYWHERE.search(outline):
        notation = found[0]
    elif found := _AFTER_A_CALL.search(outline):
        notation = found["notation"]
    else:
        called, answered = _REACT
        action = called.search(outline)
        return "Observation:" if action and answered.search(outline, action.end()) else ""
    if notation.startswith(_OPEN):
        return f"```{notation.strip(_OPEN + _SHUT)}"
    return f"{notation}>" if re.match(r"<\w", notation) else notation
