"""Conversations, and the texts that the chat templates of Qwen3 and Qwen2.5 make of them.

    python -m tests.optional.qwen_formats FOLDER      # chat_templates of an unpacked wheel of trl

writes qwen_formats.json anew. trl ships the templates as they came with the models. Qwen3's drops thinking from the
history, so that longer conversations are rendered with trl's variant for training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).with_name("qwen_formats.json")
TRL = "1.16.0"

TOOL = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run <b>é</b> & 'x'.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 2?\n"}
ANSWER = {"role": "assistant", "content": "It is \\boxed{4}."}
_ASKED = [{"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print('<é>')\n"}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": _ASKED}
TWO_CALLS = {"role": "assistant", "content": "Both.", "tool_calls": [*_ASKED, *_ASKED]}
OUTPUT = {"role": "tool", "content": "4"}
THOUGHT = {"role": "assistant", "content": "<think>\nSimple.\n</think>\n\nIt is 4."}

SHORT: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "second system message": [USER, SYSTEM, USER],
    "observation": [USER, OUTPUT],
    "observations": [USER, OUTPUT, OUTPUT],
    "answer": [SYSTEM, USER, ANSWER],
    "call": [USER, CALL],
    "two calls": [USER, TWO_CALLS],
}
"""At most one turn of the assistant."""
LONG: dict[str, list[dict[str, Any]]] = {
    "call and answer": [USER, CALL, OUTPUT, ANSWER],
    "calls and another question": [SYSTEM, USER, TWO_CALLS, OUTPUT, OUTPUT, CALL, OUTPUT, ANSWER, USER, ANSWER, USER],
}
THINKING: dict[str, list[dict[str, Any]]] = {
    "thinking": [USER, THOUGHT],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "Simple."}],
}
CASES = {
    f"{model}, {name}, {tools} tools, {'to go on' if go_on else 'as it is'}{', no thinking' if off else ''}": (
        model,
        messages,
        {"tools": [TOOL] * tools or None, "add_generation_prompt": go_on} | ({"enable_thinking": False} if off else {}),
    )
    for model, off in (("qwen3", False), ("qwen3", True), ("qwen2.5", False))
    for name, messages in (SHORT | LONG | (THINKING if (model, off) == ("qwen3", False) else {})).items()
    for tools in (0, 1, 2)
    for go_on in (False, True)
    if tools == 1 or (tools == 0 and name in SHORT) or name == "question"
}


def rendered(template: str, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    """A conversation as transformers renders it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tools, go_on = arguments["tools"], arguments["add_generation_prompt"]
    others = {key: value for key, value in arguments.items() if key not in ("tools", "add_generation_prompt")}
    (text,), _ = render_jinja_template([messages], tools, chat_template=template, add_generation_prompt=go_on, **others)
    return str(text)


def texts(folder: Path) -> dict[str, str]:
    """The text of every case, by the templates in `folder`."""
    of_model = {"qwen3": "qwen3", "qwen2.5": "qwen2_5"}
    found = {}
    for name, (model, messages, arguments) in CASES.items():
        training = model == "qwen3" and messages in LONG.values()
        file = folder / f"{of_model[model]}{'_training' if training else ''}.jinja"
        found[name] = rendered(file.read_text(encoding="utf-8"), messages, arguments)
    return found


if __name__ == "__main__":
    TEXTS.write_text(json.dumps(texts(Path(sys.argv[1])), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
