"""Keys that hold a text or name a file: `data.system_prompt` and `model.chat_template`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_megatron.config.schema import ModelConfig


_FILES = (".txt", ".md")


def is_prompt_file(value: str) -> bool:
    """Return whether `data.system_prompt` names a file: one line that ends in .txt or .md."""
    return "\n" not in value and value.endswith(_FILES)


def system_prompt_text(value: str) -> str:
    """Return the text without surrounding newlines. Raises OSError or UnicodeDecodeError for a file that cannot be
    read.
    """
    return (Path(value).read_text(encoding="utf-8") if is_prompt_file(value) else value).strip("\n")


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """Text at the start of every conversation; none if empty.

    chosen: given as `data.system_prompt`; otherwise from the tool parser.
    """

    text: str = ""
    chosen: bool = False

    def before(self, messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """`messages` with this prompt as the first message, or at the beginning of their own system message.

        A system message that contains the text is unchanged. Raises ValueError when a chosen prompt meets another one.
        """
        own = messages[0]["content"] if messages[0]["role"] == "system" else None
        if not self.text or (own is not None and self.text in own):
            return tuple(dict(message) for message in messages)
        if own is None:
            return ({"role": "system", "content": self.text}, *(dict(message) for message in messages))
        if self.chosen:
            raise ValueError(
                "has a system message of its own, and data.system_prompt is set: which of them counts? Take it out of "
                'the data, or set data.system_prompt: "" to keep the messages of the data'
            )
        joined = f"{self.text}\n\n{own}"
        return ({**messages[0], "content": joined}, *(dict(message) for message in messages[1:]))


_OURS = Path(__file__).with_name("chat_templates")
_SUFFIX = ".jinja"


def chat_template_names() -> list[str]:
    """Names of the built-in templates."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _OURS.glob(f"*{_SUFFIX}"))


def is_template_file(value: str) -> bool:
    """Return whether `model.chat_template` names a file."""
    return value.endswith(_SUFFIX)


def chat_template_text(value: str) -> str:
    """Return the Jinja text of `model.chat_template`. Raises OSError or UnicodeDecodeError if the file cannot
    be read.
    """
    file = Path(value) if is_template_file(value) else _OURS / f"{value}{_SUFFIX}"
    return file.read_text(encoding="utf-8")


def run_chat_template(model: ModelConfig) -> str | None:
    """Return the Jinja text that replaces the tokenizer's own in a run; None for the tokenizer's. Raises as above."""
    value = model.chat_template
    return None if value is None else chat_template_text(value)
