"""A tool of one's own, in addition to the sandbox: it looks words up."""

from pathlib import Path
from typing import ClassVar

from ctpo_megatron.environments import ToolResult


class Dictionary:
    """Looks words up in a file next to this one, with lines of a word, a tab and its meaning."""

    schema: ClassVar = {
        "type": "function",
        "function": {
            "name": "dictionary",
            "description": "The meaning of a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }

    def __init__(self, file):
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        self.meanings = dict(line.split("\t") for line in text.splitlines())

    async def __call__(self, arguments):
        meaning = self.meanings.get(arguments["word"])
        return ToolResult("no such word", "runtime_error") if meaning is None else ToolResult(meaning)
