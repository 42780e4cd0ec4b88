"""Reads a model's tokenizer and chat template without torch, for checks before anything heavy starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.config import ModelConfig, chat_template_names, run_chat_template
from ctpo_megatron.environments.protocol import Schema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PROBE = 'Find  x:\n  f(12, 3.5) != "a b", x_1 = -7 \\frac{1}{2} <tool_call>\n{"n": 1}\n\tend.'
"""Digits, blanks, line ends and signs, by which readers of a tokenizer differ."""
_READER_FIX = 'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json'
"""What has every program read a tokenizer as we do."""


class TokenizerError(ValueError):
    """The tokenizer or the chat template of a model cannot be read, or cannot render a message."""


def read_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model directory as its tokenizer.json has it, with its chat template, if any.

    The one reader of dry run, trainer and engines. AutoTokenizer would import torch (3 CPU-seconds), and some of its
    classes rebuild a tokenizer from the vocabulary alone, so that ids differ from those the model was trained with. It
    is used where there is no tokenizer.json. Reads files only. Raises TokenizerError.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        if not (Path(model) / "tokenizer.json").is_file() and Path(model).is_dir():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        return PreTrainedTokenizerFast.from_pretrained(str(model), local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot parse
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "download or copy the model again, with its tokenizer files"
        raise TokenizerError(f"{model}: the tokenizer cannot be read: {reason}; {fix}") from error


def decoder(model_path: str) -> Callable[[Sequence[int]], str]:
    """Return `decode_of` the tokenizer of a directory, which is read when it is first needed."""
    read = cache(lambda: decode_of(read_tokenizer(model_path)))
    return lambda token_ids: read()(token_ids)


def decode_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return what makes text of token ids, special tokens kept: the library's own call where it gives the same."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.decode  # type: ignore[no-any-return]
    return partial(fast.decode, skip_special_tokens=False)  # without a look at every id


def different_ids(ours: PreTrainedTokenizerBase, other: Any) -> str:
    """Return where another reader of the same directory gives other ids or another text than ours, with advice,
    or "".
    """
    name, ids = type(other).__name__, ours(_PROBE, add_special_tokens=False)["input_ids"]
    theirs: list[int] = other(_PROBE, add_special_tokens=False)["input_ids"]
    if theirs != ids:
        return f"as {name} it gives other ids than its tokenizer.json, {theirs[:8]}, not {ids[:8]}; {_READER_FIX}"
    if other.decode(ids) != ours.decode(ids):
        return f"as {name} it decodes another text than its tokenizer.json; {_READER_FIX}"
    return ""


def template_problem(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return why the tokenizer's chat template cannot render anything, or ""."""
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


def use_chat_template(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Set the chat template that `model.chat_template` names, if any."""
    if (text := run_chat_template(model)) is not None:
        tokenizer.chat_template = text


def exported_chat_template(model: ModelConfig) -> str | None:
    """Return the Jinja text that renders, without keywords, what a run rendered with `model.chat_template_kwargs`.

    A client that gives a keyword still decides. None: the template of the model's directory, as it is.
    """
    text = run_chat_template(model)
    if not model.chat_template_kwargs:
        return text
    text = text if text is not None else str(read_tokenizer(model.path).get_chat_template())
    given = [
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in model.chat_template_kwargs.items()
    ]
    return "".join(given) + "\n" + text  # transformers drops the line end after a block


def _literal(value: Any) -> str:
    """A value of YAML in Jinja's syntax."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


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
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q"}],
        tools=[dict(schema) for schema in offered] or None,
        tokenize=False,
        add_generation_prompt=True,
        **model.chat_template_kwargs,
    )
    names = [str(schema["function"]["name"]) for schema in offered]
    if lost := [name for name in names if name not in str(shown)]:
        raise TokenizerError(
            f"{named}: the chat template does not show the model its tools ({', '.join(lost)}); set "
            "model.chat_template to one that does, or rollout.tool_parser: fenced, which a system prompt explains, or "
            "data.tool_in_prompt: false where data.system_prompt or SFT teach the model how to call them"
        )
