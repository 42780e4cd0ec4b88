"""A tool parser for models that write programs between <python> tags."""

import re

from ctpo_megatron.environments import Message, ParseError, ToolCallRequest


class PythonTags:
    """Runs every <python>...</python> of a turn; the outputs come back in one user message."""

    example = "<python>print(6 * 7)</python>"  # the dry run plays it

    def __init__(self, most=4):
        self.most = most

    def mentions_call(self, text):
        return "<python>" in text

    def parse(self, text):
        programs = re.findall(r"<python>(.*?)</python>", text, re.DOTALL)
        if not 0 < len(programs) <= self.most:
            raise ParseError(f"write 1 to {self.most} programs, each with its </python>")
        return [ToolCallRequest("code_interpreter", {"code": program}) for program in programs]

    def render(self, calls):
        return [Message("user", "\n".join(f"<output>{call.output}</output>" for call in calls))]
