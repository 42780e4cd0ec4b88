"""A model's tokenizer and chat template without torch: what a check needs before anything heavy is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerError(ValueError):
    """The tokenizer or the chat template of a model cannot be read."""


def read_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory as its tokenizer.json says, with its chat template, if it has one.

    transformers renders and encodes, so text and ids are those of training; its class for any tokenizer.json is taken,
    since AutoTokenizer would import torch (3 CPU-seconds). Reads files only. Raises TokenizerError.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(model), local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot parse
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(f"{model}: the tokenizer cannot be read: {reason}") from error


def template_problem(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why nothing at all can be rendered with the tokenizer's chat template, or ""."""
    import jinja2

    conversation = [{"role": "user", "content": "Q"}]
    try:
        tokenizer.get_chat_template()
    except ValueError:
        return "the tokenizer has no chat template"
    try:
        tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateSyntaxError as error:
        return f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
    except Exception as error:  # templates raise what they like
        return f"the chat template cannot render one user message: {error}"
    return ""
