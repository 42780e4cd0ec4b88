"""Reads a model's tokenizer and chat template without torch, for checks before anything heavy starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.config import ModelConfig, chat_template_names, run_chat_template
from ctpo_megatron.environments.protocol import Schema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerError(ValueError):
    """The tokenizer or the chat template of a model cannot be read, or cannot render a message."""


def read_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory from its tokenizer.json, with its chat template, if any.

    transformers renders and encodes, so text and ids are the same as in training. Uses its generic class for a
    tokenizer.json, since AutoTokenizer would import torch (3 CPU-seconds). Reads files only. Raises TokenizerError.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(model), local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot parse
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(f"{model}: the tokenizer cannot be read: {reason}") from error


def template_problem(tokenizer: PreTrainedTokenizerBase) -> str:
    """Why the tokenizer's chat template cannot render anything, or ""."""
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
    except Exception as error:  # templates may raise anything
        return f"the chat template cannot render one user message: {error}"
    return ""


def training_tokenizer(model: ModelConfig, offered: Sequence[Schema]) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, with the chat template that the run trains with.

    offered: `factory.offered_schemas`. Raises TokenizerError when the template renders nothing, or omits these tools.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model.path)
    use_chat_template(tokenizer, model)
    check_chat_template(tokenizer, model, offered)
    return tokenizer


def use_chat_template(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Set the chat template that `model.chat_template` names, if any."""
    if (text := run_chat_template(model)) is not None:
        tokenizer.chat_template = text


def check_chat_template(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, offered: Sequence[Schema]) -> None:
    """Raises TokenizerError, with advice, when a chat template cannot be used for training.

    offered: `factory.offered_schemas`.
    """
    named = f"model.chat_template: {model.chat_template}" if model.chat_template else model.path
    if problem := template_problem(tokenizer):
        ours = ", ".join(chat_template_names())
        raise TokenizerError(
            f"{named}: {problem}; copy the chat_template.jinja that the model came with to {model.path}, or set "
            f"model.chat_template to one of ours ({ours}) or a file of yours"
        )
    text = tokenizer.get_chat_template()
    if unused := [key for key in model.chat_template_kwargs if key not in text]:
        raise TokenizerError(
            f"model.chat_template_kwargs: the chat template of {named} knows no {', '.join(unused)}; correct the "
            "name or leave it out"
        )
    lost = hidden_tools(tokenizer, offered, model.chat_template_kwargs)
    if lost:
        raise TokenizerError(
            f"{named}: the chat template does not show the model its tools ({', '.join(lost)}); set "
            "model.chat_template to one that does, or rollout.tool_parser: fenced, which a system prompt explains, or "
            "data.tool_in_prompt: false where data.system_prompt or SFT teach the model how to call them"
        )


def hidden_tools(
    tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Schema], chat_template_kwargs: Mapping[str, Any]
) -> list[str]:
    """Names of the tools that the chat template receives but does not render."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q"}],
        tools=[dict(schema) for schema in schemas] or None,
        tokenize=False,
        add_generation_prompt=True,
        **chat_template_kwargs,
    )
    names = [str(schema["function"]["name"]) for schema in schemas]
    return [name for name in names if name not in str(text)]
