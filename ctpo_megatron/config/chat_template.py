"""`model.chat_template`: a built-in training template by name, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctpo_megatron.config.schema import ModelConfig

_OURS = Path(__file__).with_name("chat_templates")
_SUFFIX = ".jinja"


def chat_template_names() -> list[str]:
    """Names of the built-in templates."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _OURS.glob(f"*{_SUFFIX}"))


def is_template_file(value: str) -> bool:
    """Whether `model.chat_template` names a file."""
    return value.endswith(_SUFFIX)


def chat_template_text(value: str) -> str:
    """The Jinja text of `model.chat_template`. Raises OSError or UnicodeDecodeError if the file cannot be read."""
    file = Path(value) if is_template_file(value) else _OURS / f"{value}{_SUFFIX}"
    return file.read_text(encoding="utf-8")


def run_chat_template(model: ModelConfig) -> str | None:
    """The Jinja text that replaces the tokenizer's own in a run; None for the tokenizer's. Raises as above."""
    value = model.chat_template
    return None if value is None else chat_template_text(value)
