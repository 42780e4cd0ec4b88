"""Programs in fenced blocks, as in Markdown: the first ```python block of a turn is run, and ends the turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import dedent

from ctpo_megatron.data.records import ToolCall
from ctpo_megatron.environments.protocol import Message, ParseError, ToolCallRequest, without_thinking

LANGUAGES = ("python", "python3", "py")

SYSTEM_PROMPT = """\
Work on the task step by step. You can have Python programs run for you.

To run a program, write it between a line ```python and a line ```, like this:
```python
print(6 * 7)
```
Your turn ends there, and the next message shows what the program printed. So write one program a turn, and print() \
every value that you need. Each program starts in a new interpreter: import and define all that it uses. The middle of \
a long output is left out.

When you know the answer, write no program. End with the answer in \\boxed{}."""

_FENCE = re.compile("`{3,}")


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """A fenced block. language: first word after the opening fence, in lower case. closed: has a closing fence."""

    language: str
    content: str
    closed: bool


def fenced_blocks(text: str) -> Iterator[FencedBlock]:
    """Yield the blocks of a text, in order.

    A block opens where a line ends in three or more backticks and at most one word. It closes with a line of at least
    as many backticks and nothing else. After backticks at the start of a line, more words may follow.
    """
    fence, language, content = "", "", list[str]()
    for line in text.split("\n"):
        if not fence:
            fence, language = _opened(line)
            content = []
        elif len(line.strip()) >= len(fence) and not line.strip().strip("`"):
            yield FencedBlock(language, "\n".join(content), True)
            fence = ""
        else:
            content.append(line)
    if fence:
        yield FencedBlock(language, "\n".join(content), False)


def _opened(line: str) -> tuple[str, str]:
    """Fence and language of the block that a line opens; empty if it opens none."""
    fences = list(_FENCE.finditer(line))
    if len(fences) % 2 == 0:  # each is closed on this line
        return "", ""
    last = fences[-1]
    words = line[last.end() :].split()
    if any("`" in word for word in words) or (len(words) > 1 and line[: last.start()].strip()):
        return "", ""
    return last[0], words[0].lower() if words else ""


class FencedParser:
    """The first block of Python runs, regardless of the rest of the turn; other blocks are text.

    Sampling stops where a block may have closed, and continues if it was not a program. tool: the one that runs
    programs.
    """

    tool = "code_interpreter"
    system_prompt = SYSTEM_PROMPT
    example = "```python\nprint(6 * 7)\n```"
    schemas_in_prompt = False
    stop = ("```\n",)

    def mentions_call(self, text: str) -> bool:
        """True when a turn opens a block of Python."""
        return _program(text) is not None

    def ends_turn(self, text: str) -> bool:
        """True when the first block of Python has closed."""
        block = _program(text)
        return block is not None and block.closed

    def parse(self, text: str) -> list[ToolCallRequest]:
        """See ToolParser. Raises ParseError when the block has no end or no content."""
        block = _program(text)
        if block is None or not block.closed:
            raise ParseError("the ```python block has no end: close it with a line that holds nothing but ```")
        if not block.content.strip():
            raise ParseError("the ```python block is empty")
        return [ToolCallRequest(self.tool, {"code": dedent(block.content)})]

    def render(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Return one user message per call, which chat templates without tools support."""
        return [Message("user", _shown(call)) for call in calls]


def _program(text: str) -> FencedBlock | None:
    return next((block for block in fenced_blocks(without_thinking(text)) if block.language in LANGUAGES), None)


def _shown(call: ToolCall) -> str:
    if call.status == "parse_error":
        return f"No program was run.\n{call.output}"
    if call.status != "success":
        return f"The program failed.\n{call.output}"
    return f"The program printed:\n{call.output}" if call.output else "The program printed nothing."
